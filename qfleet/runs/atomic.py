"""Atomic directories: complete or absent, even after a power failure or on a full disk."""

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

_verified: set[tuple[int, int, int, str]] = set()
"""Files whose contents this process has compared with their hash: device, inode, modification time, hash."""


class DiskFull(OSError):
    """The disk is full. Nothing of the attempted write remains, and existing files are unchanged."""


class FileEntry(BaseModel):
    """Size and hash of a file at the time of writing."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    size: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class AtomicDirectory:
    """A directory under construction. Every file is hashed while it is written, then synced."""

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
        """Hard-link a file that was just written and synced for this directory; False if linking fails."""
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
        """Hard-link a file of another directory; False if it is missing, has changed or cannot be linked."""
        try:
            if not _is_unchanged(source, entry):
                return False
            os.link(source, self.folder / name, follow_symlinks=False)
        except OSError as error:
            if error.errno in DISK_FULL:
                raise
            return False
        self.files[name] = entry
        return True


def _is_unchanged(file: Path, entry: FileEntry) -> bool:
    """True if the file still has the size and hash of `entry`.

    The contents are read in full once per process: otherwise each link would spread a corrupted file further.
    """
    found = file.lstat()
    if found.st_size != entry.size:
        return False
    key = (found.st_dev, found.st_ino, found.st_mtime_ns, entry.sha256)
    if key not in _verified:
        with file.open("rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != entry.sha256:
                return False
        _verified.add(key)
    return True


@contextmanager
def atomic_directory(target: Path) -> Iterator[AtomicDirectory]:
    """Yield a directory that becomes `target` if the block succeeds and is removed if it raises.

    The temporary name contains the writing process, which distinguishes work in progress from the remains of a
    process that died.
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
    """Remove a directory; False if it cannot be removed.

    It is renamed first, so that a reader never finds it partly removed.
    """
    hidden = temporary_name(folder)
    try:
        folder.rename(hidden)
    except OSError:
        return False
    shutil.rmtree(hidden, ignore_errors=True)
    return True


def remove_stale(parent: Path) -> None:
    """Remove temporary directories of processes that died.

    Only the single writer may call it: directories of other hosts count as abandoned.
    """
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
