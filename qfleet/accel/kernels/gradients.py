"""Gradients in bfloat16 gathered into one float32 vector by one kernel on a GPU, instead of many copies."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qfleet.accel.kernels.kernel_compiler import (
    BLOCK_SIZE,
    TensorLayout,
    block_count,
    compile_kernel,
    concat_bf16_source,
)


def gather_bf16(grads: Sequence[torch.Tensor | None], shapes: Sequence[torch.Size], out: torch.Tensor) -> bool:
    """Write gradients to the float32 vector `out`, if it is on a GPU and all of them are bfloat16; else False.

    `shapes` are those that the gradients should have.
    """
    present = [grad for grad in grads if grad is not None]
    if not out.is_cuda or len(present) < len(grads) or any(grad.dtype != torch.bfloat16 for grad in present):
        return False
    concat_bf16(present, shapes, out)
    return True


def concat_bf16(grads: Sequence[torch.Tensor], shapes: Sequence[torch.Size], out: torch.Tensor) -> None:
    """Concatenate bfloat16 gradients into a float32 vector."""
    contiguous = [contiguous_piece(grad) for grad in grads]
    layouts = tuple(layout for _, layout in contiguous)
    same = [grad.shape for grad in grads] == list(shapes)  # the kernel does not check sizes
    if same and (launch := compile_kernel("join", concat_bf16_source(layouts))) is not None:
        launch(block_count(layouts) * BLOCK_SIZE, [*(grad for grad, _ in contiguous), out])
    else:
        out.copy_(torch.cat([grad.reshape(-1) for grad in grads]))


def contiguous_piece(grad: torch.Tensor) -> tuple[torch.Tensor, TensorLayout]:
    """A gradient without gaps in memory, and its memory layout."""
    if grad.is_contiguous():
        return grad, (grad.numel(), 1, 1)
    if grad.ndim == 4 and grad.is_contiguous(memory_format=torch.channels_last):
        return grad, (grad.numel(), grad.shape[1], grad.shape[2] * grad.shape[3])
    return grad.contiguous(), (grad.numel(), 1, 1)
