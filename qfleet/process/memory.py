"""Host memory of this process: allocator settings, and recognition of out-of-memory errors."""

from __future__ import annotations

import ctypes
import re
import sys

from qfleet.core.units import format_bytes

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3


def retain_freed_memory() -> None:
    """Make glibc's allocator keep large freed blocks for reuse. Without glibc, do nothing."""
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 1 << 30)
        mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)
        mallopt(M_TOP_PAD, 64 << 20)


def out_of_memory_text(error: BaseException) -> str | None:
    """Short text of torch's RuntimeError for a failed CPU allocation; None for any other error."""
    text = str(error)
    if not isinstance(error, RuntimeError) or not re.search(r"alloc_cpu\.cpp|can't allocate memory", text):
        return None
    requested = re.search(r"allocate (\d+) bytes", text)
    return f"{format_bytes(int(requested[1]))} could not be allocated" if requested else text.partition("\n")[0]
