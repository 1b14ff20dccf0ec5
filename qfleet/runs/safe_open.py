"""Files of a run directory, read without following links.

A run may come from somewhere else: a link in it could lead to any file that this user may read, and what is shown of a
run is often passed on. The run directory itself may be a link: that one was named by the user.
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
    """An opener for `open`; OSError for a link and for anything else that is no plain file."""
    try:
        file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)  # a pipe would be waited for
    except OSError as error:
        if error.errno == errno.ELOOP:
            error.strerror = "it is a link, which may lead to any file; put a copy of the file in its place"
        raise
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is not a plain file", path)
    return file


def open_no_follow(path: Path, folder: int | None = None) -> BinaryIO:
    """The file, open for reading. With the descriptor of its `folder` only the name of `path` is looked up."""
    return open(path if folder is None else path.name, "rb", opener=partial(no_follow_opener, folder=folder))


@contextmanager
def open_folder_no_follow(path: Path) -> Iterator[int]:
    """The descriptor of a directory below a run; OSError for a link."""
    folder = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
    try:
        yield folder
    finally:
        os.close(folder)
