"""Normalisation between a convolution and its ReLU, by name."""

from __future__ import annotations

from typing import Literal

from torch import nn

Norm = Literal["none", "group", "layer"]
GROUPS = 16


def conv_norm(kind: Norm, channels: int) -> list[nn.Module]:
    """GroupNorm in 16 groups, LayerNorm over all channels and places, or nothing."""
    if kind == "none":
        return []
    return [nn.GroupNorm(GROUPS if kind == "group" else 1, channels)]


def dense_norm(kind: Norm, features: int) -> list[nn.Module]:
    """LayerNorm after a dense layer when asked for; GroupNorm speaks of convolutions only."""
    return [nn.LayerNorm(features)] if kind == "layer" else []
