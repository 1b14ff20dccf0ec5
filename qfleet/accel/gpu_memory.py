"""What a GPU has free, asked of its driver: torch would first take some hundred megabytes of it for this process.

A head, or whoever only plans a run, never computes on the GPU that a learner's process is going to use.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch


class _Memory(ctypes.Structure):
    """nvmlMemory_t, in bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def free_bytes(device: torch.device) -> int | None:
    """Of a GPU; None if there is none here to be asked."""
    if not torch.cuda.is_available():
        return None
    try:
        free = _ask_driver(_library(), _name_of(device))
    except (OSError, AttributeError):  # no such library, or one that does not know these calls
        free = None
    return torch.cuda.mem_get_info(device)[0] if free is None else free


def _library() -> Any:
    return ctypes.CDLL("libnvidia-ml.so.1")


def _name_of(device: torch.device) -> bytes:
    """By which the driver knows it, whatever CUDA_VISIBLE_DEVICES calls it."""
    facts: Any = torch.cuda.get_device_properties(device)  # knows more than its stubs do, and needs no context
    return f"GPU-{facts.uuid}".encode()


def _ask_driver(nvml: Any, name: bytes) -> int | None:
    """NVML returns 0 for success everywhere; None if it refuses, as it may for a part of a GPU."""
    if nvml.nvmlInit_v2() != 0:
        return None
    try:
        handle, memory = ctypes.c_void_p(), _Memory()
        if nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle)) != 0:
            return None
        return int(memory.free) if nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0 else None
    finally:
        nvml.nvmlShutdown()
