"""A torso of your own: residual blocks in the manner of IMPALA (Espeholt et al. 2018).

    qfleet train catch env.kwargs.pixels=true env.kwargs.side=24 agent.torso=custom_torso:residual
"""

import torch
from torch import nn

from qfleet.networks.norms import Norm, conv_norm


class Block(nn.Module):
    """[B, C, H, W] -> the same shape: two convolutions beside a shortcut."""

    def __init__(self, channels: int, norm: Norm) -> None:
        super().__init__()
        layers = [layer for _ in range(2) for layer in (
            nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1), *conv_norm(norm, channels))]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


def residual(shape: tuple[int, ...], norm: Norm, widths=(16, 32)) -> nn.Module:
    """[B, *shape] in [0, 1] -> [B, features]; every stage halves the picture."""
    channels, layers = shape[0], []
    for width in widths:
        layers += [nn.Conv2d(channels, width, 3, padding=1),
                   nn.MaxPool2d(3, stride=2, padding=1), Block(width, norm)]
        channels = width
    return nn.Sequential(*layers, nn.ReLU(), nn.Flatten())
