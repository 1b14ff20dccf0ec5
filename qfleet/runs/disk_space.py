"""Disk space that a run takes, and that is available for its checkpoints."""

from __future__ import annotations

import os
import shutil
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

BLOCK_BYTES = 512
"""Unit of st_blocks."""


@dataclass(frozen=True)
class DiskUsage:
    """Bytes on disk of a directory, and those that removing it frees: files linked elsewhere stay."""

    bytes: int
    freed: int


def disk_usage(folder: Path) -> DiskUsage:
    """Sum over all files of a directory, each counted once however many names it has there. Follows no links."""
    sizes: dict[tuple[int, int], tuple[int, int]] = {}
    names: dict[tuple[int, int], int] = {}
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            try:
                found = os.lstat(os.path.join(place, name))
            except OSError:  # a run in progress removes old checkpoints
                continue
            key = (found.st_dev, found.st_ino)
            links = 1 if stat.S_ISDIR(found.st_mode) else found.st_nlink
            sizes[key], names[key] = (found.st_blocks * BLOCK_BYTES, links), names.get(key, 0) + 1
    freed = sum(size for key, (size, links) in sizes.items() if names[key] >= links)
    return DiskUsage(sum(size for size, _ in sizes.values()), freed)


def free_checkpoint_bytes(run: Path) -> int | None:
    """Free bytes plus the bytes of existing checkpoints of the run; None if unknown. The run need not exist yet."""
    folder = run.expanduser().absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    taken: dict[int, int] = {}  # by inode, since checkpoints share files
    with suppress(OSError):
        for path in (run / "checkpoints").rglob("*"):
            found = path.lstat()
            if stat.S_ISREG(found.st_mode):
                taken[found.st_ino] = found.st_size
    try:
        return shutil.disk_usage(folder).free + sum(taken.values())
    except OSError:
        return None
