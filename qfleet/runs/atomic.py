"""Writing a directory so that it appears whole or not at all, even if the power fails or the disk is full."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from qfleet.runs.lock import LockOwner

TEMPORARY = ".tmp-"
DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

_seen_whole: set[tuple[int, int, int, str]] = set()
"""Files whose contents this process has compared with their hash: device, inode, time of change, hash."""


class DiskFull(OSError):
    """There was no room: nothing of the attempt remains, and what was there before is untouched."""


class FileEntry(BaseModel):
    """Size and hash of one file, as they were when it was written."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    size: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class AtomicDirectory:
    """A directory being written; every file is hashed on its way to the disk and synced."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, FileEntry] = {}

    def write(self, name: str, blocks: Iterable[bytes]) -> None:
        digest, size = hashlib.sha256(), 0
        with (self.folder / name).open("xb") as file:
            for block in blocks:
                file.write(block)
                digest.update(block)
                size += len(block)
            file.flush()
            os.fsync(file.fileno())
        self.files[name] = FileEntry(size=size, sha256=digest.hexdigest())

    def link_new(self, name: str, source: Path) -> bool:
        """Share a file that was just written, and synced, for this directory; False if it cannot be shared."""
        try:
            os.link(source, self.folder / name, follow_symlinks=False)
        except OSError as error:
            if error.errno in DISK_FULL:
                raise
            return False
        with (self.folder / name).open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        self.files[name] = FileEntry(size=source.stat().st_size, sha256=digest)
        return True

    def link(self, name: str, source: Path, entry: FileEntry) -> bool:
        """Share a file that another directory holds; False if it is not there as it was, or cannot be shared."""
        try:
            if not _is_whole(source, entry):
                return False
            os.link(source, self.folder / name, follow_symlinks=False)
        except OSError as error:
            if error.errno in DISK_FULL:
                raise
            return False
        self.files[name] = entry
        return True


def _is_whole(file: Path, entry: FileEntry) -> bool:
    """Whether a file is what it was; read in full once per process, or a rotten one would spread with every link."""
    found = file.lstat()
    if found.st_size != entry.size:
        return False
    key = (found.st_dev, found.st_ino, found.st_mtime_ns, entry.sha256)
    if key not in _seen_whole:
        with file.open("rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != entry.sha256:
                return False
        _seen_whole.add(key)
    return True


@contextmanager
def atomic_directory(target: Path) -> Iterator[AtomicDirectory]:
    """A draft that becomes `target` if the block ends well, and vanishes if it does not.

    The temporary name carries its writer, so that others can tell work in progress from what a dead writer left.
    """
    folder = temporary_name(target)
    draft = AtomicDirectory(folder)
    try:
        folder.mkdir(parents=True)
        yield draft
        sync_folder(folder)
        folder.rename(target)
        sync_folder(target.parent)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            written = sum(entry.size for entry in draft.files.values())
            raise DiskFull(error.errno, f"the disk is full ({os.strerror(error.errno)} after {written:,} bytes)",
                           str(target)) from error
        raise


def temporary_name(target: Path) -> Path:
    return target.with_name(f"{TEMPORARY}{target.name}~{LockOwner.current()}")


def discard(folder: Path) -> bool:
    """Remove a directory; it first loses its name, so that nobody meets it half removed. False if it cannot be."""
    hidden = temporary_name(folder)
    try:
        folder.rename(hidden)
    except OSError:
        return False
    shutil.rmtree(hidden, ignore_errors=True)
    return True


def remove_stale(parent: Path) -> None:
    """Remove what dead writers left. Call it as the one writer: drafts of other hosts count as dead."""
    for folder in parent.glob(f"{TEMPORARY}*"):
        owner = LockOwner.parse(folder.name.partition("~")[2])
        if owner is None or not owner.alive():
            shutil.rmtree(folder, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
