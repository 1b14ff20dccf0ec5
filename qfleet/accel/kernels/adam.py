"""Clipping, Adam and rounding to bfloat16 as one kernel on a GPU, where a step is limited by memory bandwidth."""

from __future__ import annotations

from typing import NamedTuple

import torch

from qfleet.accel.kernels.kernel_compiler import MAX_RESIDENT_THREADS, compile_kernel


class AdamState(NamedTuple):
    """Weights, both moments and the step count, as float32 tensors on one device."""

    weights: torch.Tensor
    mean: torch.Tensor
    square: torch.Tensor
    steps: torch.Tensor


class AdamRule(NamedTuple):
    """Learning rate, decays, ε, and the norm to which gradients are clipped (0 = no clipping)."""

    rate: float
    beta1: float
    beta2: float
    eps: float
    clip_norm: float


def fused_adam(state: AdamState, gradient: torch.Tensor, norm: torch.Tensor, ok: torch.Tensor, rule: AdamRule,
               bf16_target: tuple[torch.Tensor, torch.Tensor] | None) -> bool:
    """One step on a GPU if `ok`; also writes rounded weights to `bf16_target`, if given. False elsewhere: no step."""
    if not state.weights.is_cuda or (adam := compile_kernel("adam")) is None:
        return False
    size = len(state.weights)
    data, indices = (state.weights, state.weights) if bf16_target is None else bf16_target
    adam(min(-(-size // 4), MAX_RESIDENT_THREADS), [
        state.weights, gradient, state.mean, state.square, state.steps, norm, ok, data, indices, size,
        int(bf16_target is not None), *rule])
    return True
