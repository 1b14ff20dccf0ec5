"""The convolutions of Mnih et al. 2015: 32 of 8×8/4, 64 of 4×4/2, 64 of 3×3/1."""

from __future__ import annotations

from torch import nn

from qfleet.nets.norms import Norm, conv_norm
from qfleet.nets.patches import PatchConv2d
from qfleet.types import UserError

LAYERS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
SMALLEST = 36


def build(shape: tuple[int, ...], norm: Norm) -> nn.Module:
    """[B, C, H, W] -> [B, features]; the picture must be at least 36 pixels wide and high."""
    channels, *size = shape
    if min(size) < SMALLEST:
        raise UserError(f"agent.torso=nature needs pictures of at least {SMALLEST}×{SMALLEST}, not {size}; "
                        "set env.frame_size=84 or agent.torso=small")
    layers: list[nn.Module] = []
    for out, kernel, stride in LAYERS:
        kind = nn.Conv2d if layers else PatchConv2d
        layers += [kind(channels, out, kernel, stride), *conv_norm(norm, out), nn.ReLU()]
        channels = out
    return nn.Sequential(*layers, nn.Flatten())
