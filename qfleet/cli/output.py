"""Output of commands: results to stdout, as lines or as one JSON document; everything else to stderr."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qfleet.runconfig.resolution import Resolved


def print_error(text: str) -> None:
    """Print a line to stderr; errors are ignored if it is closed."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            print(text, file=sys.stderr, flush=True)


def print_note(args: Namespace, resolved: Resolved) -> None:
    """Print what was replaced in a recipe, if anything was, unless --quiet."""
    if resolved.note and not getattr(args, "quiet", False):
        print_error(resolved.note)


def is_reader_gone(error: OSError) -> bool:
    """True if writing to stdout failed because its reader, a pipe or a terminal, was closed."""
    with contextlib.suppress(OSError):
        return isinstance(error, BrokenPipeError) or (
            error.errno == errno.EIO and stat.S_ISCHR(os.fstat(1).st_mode))
    return False


def print_line(text: str = "") -> None:
    """Print a line of the result. A closed reader is ignored; a full disk exits with 1."""
    try:
        print(text, flush=True)
    except OSError as error:
        if is_reader_gone(error):
            return
        print_error(f"error: cannot write to stdout: {error.strerror}")
        raise SystemExit(1) from None


def print_result(args: Namespace, lines: Iterable[str], document: Any) -> None:
    """Print the result of a command: lines of text or, with --json, one JSON document."""
    if args.json:
        from qfleet.report.webpage import nan_to_null

        print_line(json.dumps(nan_to_null(document), indent=2, default=str))
        return
    for line in lines:
        print_line(line)


@contextlib.contextmanager
def clean_stdout(args: Namespace) -> Iterator[None]:
    """With --json, redirect the output of environments to stderr: stdout is for the document only."""
    if args.json and sys.stderr is not None:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    else:
        yield


@contextlib.contextmanager
def progress_counter(what: str, total: int | None = None, period: int = 1) -> Iterator[Callable[[int], None]]:
    """Yield a function that shows a count in one line of stderr, cleared at the end; silent without a terminal."""
    terminal = sys.stderr is not None and sys.stderr.isatty()
    width = 0

    def count(done: int) -> None:
        nonlocal width
        if terminal and done % period == 0:
            text = f"{done:,} {what}" if total is None else f"{min(done, total):,} of {total:,} {what}"
            width = max(width, len(text))
            print(f"\r{text}", end="", file=sys.stderr, flush=True)

    try:
        yield count
    finally:
        if width:
            print(f"\r{' ' * width}\r", end="", file=sys.stderr, flush=True)


def to_text(value: Any) -> str:
    """Format a value as in a config file: `null`, `true`, `[64, 64]`, `3e-4`; text unchanged."""
    if isinstance(value, str):
        return value
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(to_text(item) for item in value)}]"
    return json.dumps(value, default=str)


def table(rows: Sequence[Sequence[Any]]) -> list[str]:
    """Format rows as lines, each column as wide as its widest cell."""
    texts = [[to_text(cell) for cell in row] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*texts, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in texts]
