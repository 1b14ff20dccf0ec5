"""The residual network of IMPALA (Espeholt et al. 2018), 15 convolutions, in any width.

`spectral` and `pool` are what Beyond the Rainbow (Clark et al. 2024) adds to it: convolutions of residual blocks have
spectral norm 1, and the features are pooled to a fixed size, whatever the size of the picture.
"""

from __future__ import annotations

import torch
from torch import nn

from qfleet.networks.norms import Norm, conv_norm
from qfleet.networks.spectral_norm import SpectralConv2d

STAGES = (16, 32, 32)


class ResidualBlock(nn.Module):
    """x + conv(ReLU(conv(ReLU(x)))), a norm before each ReLU if asked for."""

    def __init__(self, channels: int, norm: Norm, spectral: bool) -> None:
        super().__init__()
        kind = SpectralConv2d if spectral else nn.Conv2d
        layers: list[nn.Module] = []
        for _ in range(2):
            layers += [*conv_norm(norm, channels), nn.ReLU(), kind(channels, channels, 3, padding=1)]
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
