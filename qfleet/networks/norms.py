"""Normalisation between a convolution and its ReLU, by name."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn
from torch.nn import functional

Norm = Literal["none", "group", "layer"]
GROUPS = 16


class ImageLayerNorm(nn.GroupNorm):
    """LayerNorm over all channels and places of a picture, with a weight for each channel.

    On a GPU channels lie last in memory. The kernel for groups would move pictures to the other order and the next
    convolution back: there each is one row of the kernel for rows.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(1, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return channels_last_layer_norm(x, self.weight, self.bias, self.eps) if x.is_cuda else super().forward(x)


def channels_last_layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """Pictures [N, C, H, W] normalised as rows of H·W·C numbers; the result's channels lie last in memory."""
    pictures = x.permute(0, 2, 3, 1)
    shape = pictures.shape[1:]
    return functional.layer_norm(pictures, shape, weight.expand(shape), bias.expand(shape), eps).permute(0, 3, 1, 2)


def conv_norm(kind: Norm, channels: int) -> list[nn.Module]:
    """GroupNorm in 16 groups, LayerNorm over all channels and places, or nothing."""
    if kind == "none":
        return []
    return [nn.GroupNorm(GROUPS, channels) if kind == "group" else ImageLayerNorm(channels)]


def dense_norm(kind: Norm, features: int) -> list[nn.Module]:
    """LayerNorm after a dense layer when asked for; GroupNorm speaks of convolutions only."""
    return [nn.LayerNorm(features)] if kind == "layer" else []
