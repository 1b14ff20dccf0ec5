"""What proves that a run was made here, by this user: only then is the code imported that its config names.

The directory and its plain `run.json` belong to this user, and `run.json` holds a fingerprint of this machine and of
this very directory: its inode and the time of its creation, which the system sets and no user, copy or archive can
choose. A run that is moved or renamed on its disk keeps them. Another directory that gets the same inode later was
created later.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import stat
import struct
import sys
from contextlib import suppress
from pathlib import Path

AT_FDCWD, STATX_BTIME = -100, 0x800
STATX_BYTES, BTIME_OFFSET = 256, 80


def fingerprint(folder: Path) -> str:
    """What no copy of the directory has.

    The number of the device is left out: for many file systems it changes with every boot.
    """
    return hashlib.sha256(f"{_machine()} {folder.stat().st_ino} {_created(folder)}".encode()).hexdigest()


def owned(folder: Path, record: Path) -> bool:
    """Whether both belong to this user, and the record is no link, behind which any file of this user may be."""
    there, file = folder.stat(), record.lstat()
    mine = not hasattr(os, "getuid") or there.st_uid == file.st_uid == os.getuid()
    return mine and stat.S_ISREG(file.st_mode)


def _created(folder: Path) -> int | None:
    """When the directory was created, in nanoseconds; None where the file system or the C library does not tell."""
    if sys.platform != "linux":
        found = getattr(folder.stat(), "st_birthtime", None)
        return None if found is None else int(found * 1e9)
    buffer = ctypes.create_string_buffer(STATX_BYTES)
    try:
        failed = ctypes.CDLL(None).statx(AT_FDCWD, os.fsencode(folder), 0, STATX_BTIME, buffer)
    except (AttributeError, OSError, TypeError):
        return None
    if failed or not struct.unpack_from("=I", buffer)[0] & STATX_BTIME:
        return None
    seconds, rest = struct.unpack_from("=qI", buffer, BTIME_OFFSET)
    return int(seconds * 10**9 + rest)


def _machine() -> str:
    """The identity of this installation, secret enough that a stranger cannot guess it; else the host's name."""
    for place in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        with suppress(OSError, UnicodeDecodeError):
            if found := Path(place).read_text().strip():
                return found
    return platform.node()
