"""Output layers of a value head as one kernel each way on a GPU (`value_head_source`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from qfleet.accel.kernels.bf16 import VECTOR_WIDTH, kernels_available, launch_kernel, sum_rows_bf16
from qfleet.accel.kernels.kernel_compiler import BLOCK_SIZE
from qfleet.accel.kernels.value_head_source import HEAD_SOURCE, ITEMS_PER_PARTIAL_SUM, MAX_ACTIONS


def can_fuse_head(x: torch.Tensor, output: nn.Linear) -> bool:
    """True if the head can be fused for x: bfloat16 [B, features], and at most MAX_ACTIONS outputs."""
    return (
        x.ndim == 2
        and x.dtype == torch.bfloat16
        and output.in_features % VECTOR_WIDTH == 0
        and output.out_features <= MAX_ACTIONS
        and kernels_available(output.weight, HEAD_SOURCE, "rate", "unrate", "weigh")
    )


def fused_head(h: torch.Tensor, advantage: nn.Linear, h2: torch.Tensor | None = None, value: nn.Linear | None = None,
               relu: bool = False) -> torch.Tensor:
    """Values [B, A] in float32 of features [B, F] or of their ReLU, if `can_fuse_head`.

    With a value stream (dueling) these are v + a − mean a.
    """
    value_params = (None, None) if value is None else (value.weight, value.bias)
    found: torch.Tensor = FusedHead.apply(h, h2, advantage.weight, advantage.bias, *value_params, relu)
    return found


class FusedHead(torch.autograd.Function):
    """Autograd function of the fused head."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, h2: torch.Tensor | None, wa: torch.Tensor, ba: torch.Tensor,
                wv: torch.Tensor | None, bv: torch.Tensor | None, relu: bool) -> torch.Tensor:
        h, h2 = h.contiguous(), None if h2 is None else h2.contiguous()
        items, width, actions = len(h), h.shape[1], len(wa)
        q = torch.empty(items, actions, device=h.device)
        given = [x if x is not None else h for x in (h2, wa, ba, wv, bv)]
        launch_kernel("rate", HEAD_SOURCE, -(-items * 32 // BLOCK_SIZE) * BLOCK_SIZE,
                      [h, *given, q, items, width, actions, int(h2 is not None), int(relu)])
        ctx.save_for_backward(h, h2, wa, wv)
        ctx.relu = int(relu)
        return q

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        h, h2, wa, wv = ctx.saved_tensors
        (items, width), actions, dueling = h.shape, len(wa), int(h2 is not None)
        outputs = actions + dueling
        dh, dh2 = torch.empty_like(h), None if h2 is None else torch.empty_like(h)
        d_out = torch.empty(items, outputs, device=h.device)
        parts = torch.empty(-(-items // ITEMS_PER_PARTIAL_SUM), outputs * (width + 1), device=h.device)
        second, weight, other = (h, wa, dh) if h2 is None else (h2, wv, dh2)
        sizes = [items, width, actions, dueling, ctx.relu]
        launch_kernel("unrate", HEAD_SOURCE, items * width // VECTOR_WIDTH,
                      [grads[0].contiguous(), h, second, wa, weight, dh, other, d_out, *sizes])
        launch_kernel("weigh", HEAD_SOURCE, parts.numel(), [d_out, h, second, parts, *sizes, ITEMS_PER_PARTIAL_SUM])
        weights, biases = sum_rows_bf16(parts).split([outputs * width, outputs])
        dwa, dwv = weights.view(outputs, width).split([actions, dueling])
        dba, dbv = biases.split([actions, dueling])
        return (dh, dh2, dwa, dba, *((dwv, dbv) if dueling else (None, None)), None)
