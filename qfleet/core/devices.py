"""Where tensors are: in main memory, or on a GPU that computes them later."""

from __future__ import annotations

import torch


def is_on_host(tensor: torch.Tensor) -> bool:
    """True if the host can read the values at once.

    Reading those of a GPU waits for all queued operations, and a CUDA graph cannot depend on them: there code computes
    both branches instead.
    """
    return tensor.device.type == "cpu"


def staged_for(device: torch.device, values: torch.Tensor) -> torch.Tensor:
    """`values` in memory from which they can be copied to `device` asynchronously."""
    return values.pin_memory() if reads_pinned(device) else values


def reads_pinned(device: torch.device) -> bool:
    """True if an asynchronous copy to the device needs pinned memory, as for a GPU."""
    return device.type == "cuda"
