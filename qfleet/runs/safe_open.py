"""Opening files of a run directory without following links.

A run may come from another machine: a link in it could lead to any file this user may read, and reports of a run are
often shared. The run directory itself may be a link, since the user named it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO


def no_follow_opener(path: str, flags: int, folder: int | None = None) -> int:
    """Opener for `open`; OSError for a link and for anything else that is not a regular file."""
    try:
        file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)  # a pipe would block
    except OSError as error:
        if error.errno == errno.ELOOP:
            text = "it is a link, which may lead to any file; replace it with a copy of the file"
            raise OSError(errno.ELOOP, text, path) from None
        raise
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is not a regular file", path)
    return file


def open_no_follow(path: Path, folder: int | None = None) -> BinaryIO:
    """Open a file for reading. With the descriptor of its `folder`, only the name of `path` is looked up."""
    return open(path if folder is None else path.name, "rb", opener=partial(no_follow_opener, folder=folder))


@contextmanager
def open_folder_no_follow(path: Path) -> Iterator[int]:
    """Yield the descriptor of a directory below a run; OSError for a link."""
    folder = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
    try:
        yield folder
    finally:
        os.close(folder)
