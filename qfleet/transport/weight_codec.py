"""Serialisation of weights: safetensors, which holds tensors and no executable code."""

from __future__ import annotations

from collections.abc import Mapping

import safetensors
import safetensors.torch
import torch


def pack_weights(state: Mapping[str, torch.Tensor]) -> bytes:
    """Serialise tensors of any device, by name."""
    data: bytes = safetensors.torch.save({name: value.detach().cpu().contiguous() for name, value in state.items()})
    return data


def unpack_weights(data: bytes) -> dict[str, torch.Tensor]:
    """Weights on the CPU; ValueError if the bytes are not safetensors."""
    try:
        state: dict[str, torch.Tensor] = safetensors.torch.load(data)
    except (safetensors.SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise ValueError(f"the data is not valid safetensors: {error}") from None
    return state
