"""Convolutions of data-efficient Rainbow (van Hasselt et al. 2019): 32 of 5×5/5, 64 of 5×5/5."""

from __future__ import annotations

from torch import nn

from qfleet.core.errors import UserError
from qfleet.networks.norms import Norm, conv_norm

WIDTHS = (32, 64)
SMALLEST = 25


def build(shape: tuple[int, ...], norm: Norm) -> nn.Module:
    """[B, C, H, W] -> [B, features]; images must have at least 25×25 pixels."""
    channels, *size = shape
    if min(size) < SMALLEST:
        raise UserError(f"agent.torso=efficient needs images of at least {SMALLEST}×{SMALLEST} pixels, "
                        f"not {size[0]}×{size[1]}; set env.frame_size=84 or agent.torso=small")
    layers: list[nn.Module] = []
    for out in WIDTHS:
        layers += [nn.Conv2d(channels, out, 5, 5), *conv_norm(norm, out), nn.ReLU()]
        channels = out
    return nn.Sequential(*layers, nn.Flatten())
