"""Tracebacks without the package's own frames, for failures in user code."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path
from types import TracebackType

PACKAGE = Path(__file__).parents[1]
LIBRARIES = {"site-packages", "dist-packages"}


def first_line(error: BaseException) -> str:
    """Type and first line of an exception, for messages."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def user_traceback(error: BaseException) -> str:
    """Traceback of an exception raised outside the package, without the package's frames before it."""
    start = error.__traceback__
    while start is not None and _in_package(start):
        start = start.tb_next
    return "".join(traceback.format_exception(type(error), error, start or error.__traceback__)).rstrip()


def user_frame(error: BaseException) -> tuple[traceback.FrameSummary | None, bool]:
    """Innermost frame of user code called by the package, and whether the exception was raised there.

    It was not if the user's code called the package in turn and that call failed.
    """
    frames = traceback.extract_tb(error.__traceback__)
    ours = [_within(Path(frame.filename), PACKAGE) for frame in frames]
    called = frames[ours.index(True):] if True in ours else []
    own = [frame for frame in called if not _is_library(frame.filename)]
    found = next((frame for frame in reversed(own) if not _within(Path(frame.filename), PACKAGE)), None)
    return found, bool(own) and own[-1] is found


def raised_text(name: str, error: BaseException) -> str:
    """Name of a function or object of the user, the file and line, and the exception that it raised there."""
    what = f"{type(error).__name__}: {error}".removesuffix(": ")
    frame, _ = user_frame(error)
    where = "" if frame is None else f" ({frame.filename}, line {frame.lineno})"
    return f"{name}{where} raised {what}"


def _in_package(entry: TracebackType) -> bool:
    return _within(Path(entry.tb_frame.f_code.co_filename), PACKAGE)


def _is_library(filename: str) -> bool:
    """True for files of Python or of an installed package, and for generated code without a file."""
    path = Path(filename)
    return (filename.startswith("<") or bool(LIBRARIES.intersection(path.parts))
            or _within(path, Path(sysconfig.get_path("stdlib"))))


def _within(path: Path, folder: Path) -> bool:
    return path.is_relative_to(folder)
