"""Conversion of arrays to aligned tensors, for bitwise reproducible results."""

from __future__ import annotations

import numpy as np
import torch

ALIGNMENT_BYTES = 64
"""Alignment of torch's own memory; numpy aligns to 16 bytes, and views to anything."""


def aligned_tensor(array: np.ndarray) -> torch.Tensor:
    """The array as a CPU tensor, copied unless it begins at a multiple of 64 bytes.

    Matrix kernels sum in another order if memory is aligned differently, and results must not
    depend on the address of an array. Integers need no copy: they are converted before they are
    multiplied.
    """
    tensor = torch.from_numpy(array)
    if not tensor.is_floating_point() or tensor.data_ptr() % ALIGNMENT_BYTES == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
