"""Convolutions of Mnih et al. 2015: 32 of 8×8/4, 64 of 4×4/2, 64 of 3×3/1."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

from qfleet.accel.kernels.conv_epilogue import can_fuse_epilogue, fused_epilogue
from qfleet.core.errors import UserError
from qfleet.networks.norms import ImageLayerNorm, Norm, conv_norm
from qfleet.networks.patch_conv import SpaceToDepthConv2d

LAYERS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
SMALLEST = 36


class Nature(nn.Sequential):
    """Convolutions, each with an optional norm and a ReLU, then flattening.

    On a GPU bias, norm and ReLU of a convolution are fused into one kernel.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = list(self)
        stages = [(layer, after) for layer, after in pairwise(layers) if isinstance(layer, nn.Conv2d)]
        grouped = any(type(after) is nn.GroupNorm for _, after in stages)
        if grouped or not all(can_fuse_epilogue(conv.weight, conv.out_channels) for conv, _ in stages):
            found: torch.Tensor = super().forward(x)
            return found
        for conv, after in stages:
            sums, scale = (
                conv.conv_without_bias(x) if isinstance(conv, SpaceToDepthConv2d) else (conv_without_bias(conv, x), 1.0)
            )
            norm = after if isinstance(after, ImageLayerNorm) else None
            x = fused_epilogue(sums, conv.bias, norm, scale, planar=conv is stages[-1][0])
        return x


def conv_without_bias(conv: nn.Conv2d, x: torch.Tensor) -> torch.Tensor:
    """Convolution without its bias."""
    return nn.functional.conv2d(x, conv.weight, stride=conv.stride)


def build(shape: tuple[int, ...], norm: Norm) -> nn.Module:
    """[B, C, H, W] -> [B, features]; images must have at least 36×36 pixels."""
    channels, *size = shape
    if min(size) < SMALLEST:
        raise UserError(f"agent.torso=nature needs images of at least {SMALLEST}×{SMALLEST} pixels, "
                        f"not {size[0]}×{size[1]}; set env.frame_size=84 or agent.torso=small")
    layers: list[nn.Module] = []
    for out, kernel, stride in LAYERS:
        conv = nn.Conv2d if layers else SpaceToDepthConv2d
        layers += [conv(channels, out, kernel, stride), *conv_norm(norm, out), nn.ReLU()]
        channels = out
    return Nature(*layers, nn.Flatten())
