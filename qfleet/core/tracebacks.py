"""Whose code an exception comes from: the package's own frames are left out where the user's code failed."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path
from types import TracebackType

PACKAGE = Path(__file__).parents[1]
LIBRARIES = {"site-packages", "dist-packages"}


def user_traceback(error: BaseException) -> str:
    """The traceback of an exception that code outside of the package raised, without the package's frames before it."""
    start = error.__traceback__
    while start is not None and _ours(start):
        start = start.tb_next
    return "".join(traceback.format_exception(type(error), error, start or error.__traceback__)).rstrip()


def user_frame(error: BaseException) -> tuple[traceback.FrameSummary | None, bool]:
    """The innermost frame of the user's own code that the package called, and whether the exception comes from it.

    It does not if the user's code has called the package in turn, and that failed.
    """
    frames = traceback.extract_tb(error.__traceback__)
    ours = [_within(Path(frame.filename), PACKAGE) for frame in frames]
    called = frames[ours.index(True):] if True in ours else []
    own = [frame for frame in called if not _library(frame.filename)]
    found = next((frame for frame in reversed(own) if not _within(Path(frame.filename), PACKAGE)), None)
    return found, bool(own) and own[-1] is found


def _ours(entry: TracebackType) -> bool:
    return _within(Path(entry.tb_frame.f_code.co_filename), PACKAGE)


def _library(filename: str) -> bool:
    """Whether a file belongs to Python or to an installed package, or is none, as the code of generated functions."""
    path = Path(filename)
    return (filename.startswith("<") or bool(LIBRARIES.intersection(path.parts))
            or _within(path, Path(sysconfig.get_path("stdlib"))))


def _within(path: Path, folder: Path) -> bool:
    return path.is_relative_to(folder)
