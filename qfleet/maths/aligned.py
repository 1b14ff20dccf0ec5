"""Arrays as tensors whose bits lead to the same bits wherever they lie in memory."""

from __future__ import annotations

import numpy as np
import torch

BORDER = 64
"""Bytes at whose multiples torch's own memory begins; numpy's begins at those of 16, or wherever a view does."""


def aligned_tensor(array: np.ndarray) -> torch.Tensor:
    """The array as a tensor of the CPU, in memory of its own unless it begins at a multiple of 64 bytes.

    Kernels for matrices add up in another order where memory is aligned otherwise. Where an array happens to lie must
    not decide what a run learns. Whole numbers need no such care: they are converted before they are multiplied.
    """
    tensor = torch.from_numpy(array)
    if not tensor.is_floating_point() or tensor.data_ptr() % BORDER == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
