"""Normalisation layers between a layer and its ReLU, by name."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from qfleet.accel.kernels.images import image_layer_norm

Norm = Literal["none", "group", "layer"]
GROUPS = 16


class ImageLayerNorm(nn.GroupNorm):
    """LayerNorm over all channels and positions of an image, with one weight per channel."""

    def __init__(self, channels: int) -> None:
        super().__init__(1, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return image_layer_norm(x, self.weight, self.bias, self.eps)


def conv_norm(kind: Norm, channels: int) -> list[nn.Module]:
    """GroupNorm with 16 groups, LayerNorm over all channels and positions, or nothing."""
    if kind == "none":
        return []
    return [nn.GroupNorm(GROUPS, channels) if kind == "group" else ImageLayerNorm(channels)]


def dense_norm(kind: Norm, features: int) -> list[nn.Module]:
    """LayerNorm after a dense layer if `kind` is layer; GroupNorm applies to convolutions only."""
    return [nn.LayerNorm(features)] if kind == "layer" else []
