"""Weights as bytes: safetensors, which holds numbers and nothing that could run."""

from __future__ import annotations

from collections.abc import Mapping

import safetensors
import safetensors.torch
import torch


def pack_weights(state: Mapping[str, torch.Tensor]) -> bytes:
    """All weights by name, from whatever device."""
    data: bytes = safetensors.torch.save({name: value.detach().cpu().contiguous() for name, value in state.items()})
    return data


def unpack_weights(data: bytes) -> dict[str, torch.Tensor]:
    """Weights on the CPU; ValueError if the bytes are not safetensors."""
    try:
        state: dict[str, torch.Tensor] = safetensors.torch.load(data)
    except (safetensors.SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise ValueError(f"these bytes are not safetensors: {error}") from None
    return state
