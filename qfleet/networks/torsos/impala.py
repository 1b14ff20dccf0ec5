"""Residual network of IMPALA (Espeholt et al. 2018): 15 convolutions of any width.

`spectral` and `pool` are the additions of Beyond the Rainbow (Clark et al. 2024): the convolutions of residual blocks
have spectral norm 1, and the features are pooled to a fixed size for images of any size.
"""

from __future__ import annotations

import torch
from torch import nn

from qfleet.networks.norms import Norm, conv_norm
from qfleet.networks.spectral_norm import SpectralConv2d

STAGES = (16, 32, 32)


class ResidualBlock(nn.Module):
    """x + conv(ReLU(conv(ReLU(x)))), with an optional norm before each ReLU."""

    def __init__(self, channels: int, norm: Norm, spectral: bool) -> None:
        super().__init__()
        conv = SpectralConv2d if spectral else nn.Conv2d
        layers: list[nn.Module] = []
        for _ in range(2):
            layers += [*conv_norm(norm, channels), nn.ReLU(), conv(channels, channels, 3, padding=1)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.layers(x)
        return out


def build(shape: tuple[int, ...], norm: Norm, width: int = 1, spectral: bool = False, pool: int = 0) -> nn.Module:
    """[B, C, H, W] -> [B, features]; any size. `width` multiplies all channels, `pool` is the side after pooling."""
    channels = shape[0]
    layers: list[nn.Module] = []
    for stage in STAGES:
        out = stage * width
        layers += [nn.Conv2d(channels, out, 3, padding=1), nn.MaxPool2d(3, stride=2, padding=1),
                   ResidualBlock(out, norm, spectral), ResidualBlock(out, norm, spectral)]
        channels = out
    pooled = [nn.AdaptiveMaxPool2d(pool)] if pool else []
    return nn.Sequential(*layers, *conv_norm(norm, channels), nn.ReLU(), *pooled, nn.Flatten())
