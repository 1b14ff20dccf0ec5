"""Memory layout of a network's parameters that kernels of a GPU prefer: aligned, and convolutions channels-last."""

from __future__ import annotations

from collections.abc import Sequence

import torch

PARAM_ALIGNMENT = 64
"""Alignment of parameters on a GPU, in elements: matrix kernels are much slower without 16-byte loads."""


def uses_aligned_copy(device: torch.device, dtype: torch.dtype) -> bool:
    """True if networks on this device compute with an aligned copy of the parameters: bfloat16 ones on a GPU."""
    return device.type == "cuda" and dtype == torch.bfloat16


def aligned_views(data: torch.Tensor, shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
    """Views of a vector, one per shape, at multiples of PARAM_ALIGNMENT; 4-D views are channels-last."""
    views, start = [], 0
    for shape in shapes:
        piece = data[start:start + shape.numel()]
        views.append(_channels_last_view(piece, shape))
        start += -(-shape.numel() // PARAM_ALIGNMENT) * PARAM_ALIGNMENT
    return views


def gather_index(shapes: Sequence[torch.Size]) -> torch.Tensor:
    """For each element of an aligned vector, its index in the contiguous channels-first one; 0 in gaps."""
    sizes = [-(-shape.numel() // PARAM_ALIGNMENT) * PARAM_ALIGNMENT for shape in shapes]
    index, start = torch.zeros(sum(sizes), dtype=torch.int64), 0
    for view, shape in zip(aligned_views(index, shapes), shapes, strict=True):
        view.copy_(torch.arange(start, start + shape.numel()).view(shape))
        start += shape.numel()
    return index


def scatter_index(shapes: Sequence[torch.Size]) -> torch.Tensor:
    """Inverse of `gather_index`, int32: for each element of the contiguous vector, its aligned index."""
    index = torch.arange(len(gather_index(shapes)), dtype=torch.int32)
    return torch.cat([view.reshape(-1) for view in aligned_views(index, shapes)])


def _channels_last_view(piece: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    if len(shape) != 4:
        return piece.view(shape)
    features, channels, height, width = shape
    return piece.view(features, height, width, channels).permute(0, 3, 1, 2)
