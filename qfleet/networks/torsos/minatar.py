"""Convolutions for boards and other small images: the single one of MinAtar's DQN (Young and Tian 2019), or two."""

from __future__ import annotations

from torch import nn

from qfleet.networks.norms import Norm, conv_norm

SINGLE_SIDE = 20
"""Pixels of the longer side up to which one convolution without stride is enough."""

WIDTHS = (16, 32)


def build(shape: tuple[int, ...], norm: Norm) -> nn.Module:
    """[B, C, H, W] -> [B, features]: 16 of 3×3/1 up to 20×20 pixels, else 16 of 3×3/2 and 32 of 3×3/2; any size."""
    channels, *size = shape
    stride, widths = (1, WIDTHS[:1]) if max(size) <= SINGLE_SIDE else (2, WIDTHS)
    padding = 0 if min(size) >= 5 else 1
    layers: list[nn.Module] = []
    for width in widths:
        layers += [nn.Conv2d(channels, width, 3, stride, padding), *conv_norm(norm, width), nn.ReLU()]
        channels = width
    return nn.Sequential(*layers, nn.Flatten())
