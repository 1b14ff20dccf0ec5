"""Disk space available for the checkpoints of a run."""

from __future__ import annotations

import shutil
import stat
from contextlib import suppress
from pathlib import Path


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
