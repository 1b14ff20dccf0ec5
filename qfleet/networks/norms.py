"""Normalisation layers between a layer and its ReLU, by name."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn
from torch.nn import functional

Norm = Literal["none", "group", "layer"]
GROUPS = 16


class ImageLayerNorm(nn.GroupNorm):
    """LayerNorm over all channels and positions of an image, with one weight per channel.

    On a GPU images are channels-last. The GroupNorm kernel would convert them to channels-first and the next
    convolution back, so LayerNorm's kernel is used there, with each image as one row.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(1, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return channels_last_layer_norm(x, self.weight, self.bias, self.eps) if x.is_cuda else super().forward(x)


def channels_last_layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise images [N, C, H, W] as rows of H·W·C floats; the result is channels-last."""
    images = x.permute(0, 2, 3, 1)
    shape = images.shape[1:]
    return functional.layer_norm(images, shape, weight.expand(shape), bias.expand(shape), eps).permute(0, 3, 1, 2)


def conv_norm(kind: Norm, channels: int) -> list[nn.Module]:
    """GroupNorm with 16 groups, LayerNorm over all channels and positions, or nothing."""
    if kind == "none":
        return []
    return [nn.GroupNorm(GROUPS, channels) if kind == "group" else ImageLayerNorm(channels)]


def dense_norm(kind: Norm, features: int) -> list[nn.Module]:
    """LayerNorm after a dense layer if `kind` is layer; GroupNorm applies to convolutions only."""
    return [nn.LayerNorm(features)] if kind == "layer" else []
