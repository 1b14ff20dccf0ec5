"""Free GPU memory, read from the driver: torch would create a context of some hundred megabytes.

The driver process and planning commands never compute on the GPU that a learner process will use.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch


class _Memory(ctypes.Structure):
    """nvmlMemory_t, in bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def free_bytes(device: torch.device) -> int | None:
    """Free bytes of a GPU; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    try:
        free = _free_from_driver(_library(), _uuid_of(device))
    except (OSError, AttributeError):  # the library or one of its functions is missing
        free = None
    return torch.cuda.mem_get_info(device)[0] if free is None else free


def _library() -> Any:
    return ctypes.CDLL("libnvidia-ml.so.1")


def _uuid_of(device: torch.device) -> bytes:
    """UUID by which the driver identifies the GPU, independent of CUDA_VISIBLE_DEVICES."""
    properties: Any = torch.cuda.get_device_properties(device)  # the stubs lack `uuid`; needs no context
    return f"GPU-{properties.uuid}".encode()


def _free_from_driver(nvml: Any, name: bytes) -> int | None:
    """Free bytes from NVML, whose functions return 0 on success; None if it fails, as it may for a MIG slice."""
    if nvml.nvmlInit_v2() != 0:
        return None
    try:
        handle, memory = ctypes.c_void_p(), _Memory()
        if nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle)) != 0:
            return None
        return int(memory.free) if nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0 else None
    finally:
        nvml.nvmlShutdown()
