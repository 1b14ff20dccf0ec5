"""Keep freed memory in the process: to give pages back and fault them in again at every update takes time."""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3


def keep_pages() -> None:
    """Tell glibc's allocator to reuse large blocks instead of returning them; elsewhere nothing happens."""
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 1 << 30)
        mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)
        mallopt(M_TOP_PAD, 64 << 20)
