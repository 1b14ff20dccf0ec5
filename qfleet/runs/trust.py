"""Proof that a run was created on this machine by this user: only then is code named by its config imported.

The directory and its regular file `run.json` belong to this user, and `run.json` holds a fingerprint of the machine
and of the directory: its inode and creation time, which the system sets and no user, copy or archive can choose. A
move or rename on the same disk keeps both. A directory that reuses the inode later has a later creation time.
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
    """Hash that no copy of the directory shares.

    The device number is left out: for many file systems it changes with every boot.
    """
    return hashlib.sha256(f"{_machine()} {folder.stat().st_ino} {_created(folder)}".encode()).hexdigest()


def owned(folder: Path, record: Path) -> bool:
    """True if both belong to this user and the record is a regular file, not a link to another file of this user."""
    there, file = folder.stat(), record.lstat()
    mine = not hasattr(os, "getuid") or there.st_uid == file.st_uid == os.getuid()
    return mine and stat.S_ISREG(file.st_mode)


def _created(folder: Path) -> int | None:
    """Creation time in nanoseconds; None if the file system or the C library does not provide it."""
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
    """Id of this installation, which others cannot guess; the host name if there is none."""
    for place in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        with suppress(OSError, UnicodeDecodeError):
            if found := Path(place).read_text().strip():
                return found
    return platform.node()
