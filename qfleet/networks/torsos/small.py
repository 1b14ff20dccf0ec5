"""Two 3×3 convolutions for small images (grids of a few pixels, MinAtar-like boards)."""

from __future__ import annotations

from torch import nn

from qfleet.networks.norms import Norm, conv_norm

WIDTH = 32


def build(shape: tuple[int, ...], norm: Norm) -> nn.Module:
    """Build the torso for images of any size.

    Args:
        shape: Shape of an image, (C, H, W), with stacked frames along the channels.
        norm: Value of `agent.norm`.

    Returns:
        Module from images [B, C, H, W] to features [B, F].
    """
    layers: list[nn.Module] = []
    for channels in (shape[0], WIDTH):
        layers += [nn.Conv2d(channels, WIDTH, 3, padding=1), *conv_norm(norm, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten())
