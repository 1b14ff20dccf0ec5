"""Main memory of this process: how freed pages are kept for reuse, and how its lack is told from other errors."""

from __future__ import annotations

import ctypes
import re
import sys

from qfleet.core.units import format_bytes

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3


def retain_freed_memory() -> None:
    """Tell glibc's allocator to reuse large blocks instead of returning them; elsewhere nothing happens."""
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 1 << 30)
        mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)
        mallopt(M_TOP_PAD, 64 << 20)


def out_of_memory_text(error: BaseException) -> str | None:
    """What torch says, in a RuntimeError, where a CPU's memory is short, in a few words; None for other errors."""
    text = str(error)
    if not isinstance(error, RuntimeError) or not re.search(r"alloc_cpu\.cpp|can't allocate memory", text):
        return None
    asked = re.search(r"allocate (\d+) bytes", text)
    return f"{format_bytes(int(asked[1]))} could not be allocated" if asked else text.partition("\n")[0]
