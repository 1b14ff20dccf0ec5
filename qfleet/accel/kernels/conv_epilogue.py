"""Bias, LayerNorm and ReLU of a layer as one kernel on a GPU (`conv_epilogue_source`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from qfleet.accel.kernels.bf16 import kernels_available, launch_kernel, sum_rows_bf16
from qfleet.accel.kernels.conv_epilogue_source import BIAS, EPILOGUE_SOURCE, NORM, PLANAR, channels_supported
from qfleet.accel.kernels.kernel_compiler import BLOCK_SIZE


def can_fuse_epilogue(weight: torch.Tensor, channels: int) -> bool:
    """True if the epilogue of a layer with these weights can be fused."""
    return channels_supported(channels) and kernels_available(weight, EPILOGUE_SOURCE, "finish", "unfinish")


def fused_epilogue(
    x: torch.Tensor, bias: torch.Tensor | None, norm: nn.LayerNorm | nn.GroupNorm | None, scale: float = 1.0,
    planar: bool = False) -> torch.Tensor:
    """ReLU(norm(scale · x + bias)) of images [B, C, H, W] or features [B, C], if `can_fuse_epilogue`.

    The norm, if any, is over all elements of an item, with one weight per channel. `planar` returns
    [B, C · H · W], as flattening does.
    """
    weight, shift, eps = (None, None, 0.0) if norm is None else (norm.weight, norm.bias, norm.eps)
    found: torch.Tensor = FusedEpilogue.apply(x, bias, weight, shift, scale, eps, planar)
    return found


class FusedEpilogue(torch.autograd.Function):
    """Autograd function of the fused epilogue."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, weight: torch.Tensor | None,
                shift: torch.Tensor | None, scale: float, eps: float, planar: bool) -> torch.Tensor:
        x = channels_last(x)
        items, channels, pixels = len(x), x.shape[1], x[0, 0].numel()
        flags = NORM * (weight is not None) | PLANAR * planar | BIAS * (bias is not None)
        stats = torch.empty(items if weight is not None else 0, 2, device=x.device)
        out = x.new_empty(items, channels * pixels) if planar else torch.empty_like(x)
        given = [x if vector is None else vector for vector in (bias, weight, shift)]  # x stands for None; see flags
        launch_kernel(
            "finish", EPILOGUE_SOURCE, items * BLOCK_SIZE, [x, out, *given, stats, channels, pixels, flags, scale, eps]
        )
        ctx.save_for_backward(x, bias, weight, shift, stats)
        ctx.plan = (channels, pixels, flags, scale)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, bias, weight, shift, stats = ctx.saved_tensors
        channels, pixels, flags, scale = ctx.plan
        dy = grads[0].contiguous() if flags & PLANAR else channels_last(grads[0])
        dx = torch.empty_like(x)
        parts = torch.empty(len(x), 3 if weight is not None else 1, channels, device=x.device)
        given = [x if vector is None else vector for vector in (bias, weight, shift)]
        launch_kernel(
            "unfinish", EPILOGUE_SOURCE, len(x) * BLOCK_SIZE,
            [dy, x, dx, parts, *given, stats, channels, pixels, flags, scale])
        sums = sum_rows_bf16(parts)
        d_bias = None if bias is None else sums[0]
        return (dx, d_bias, *((None, None) if weight is None else sums[1:]), None, None, None)


def channels_last(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x.contiguous()

