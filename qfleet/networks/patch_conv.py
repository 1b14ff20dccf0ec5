"""First convolution of an image on a GPU, with pixel patches as channels (space to depth).

An 8×8 convolution of 4 channels with stride 4 equals a 2×2 convolution of 64 channels with stride 1 over 4×4 pixel
patches. Matrix units need many channels: this is three times as fast. Shapes: B images, C channels, H and W pixels, s
stride, h = H/s, w = W/s, O output channels.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from qfleet.accel.kernels.images import bytes_to_patches


class SpaceToDepthConv2d(nn.Conv2d):
    """Convolution that also accepts uint8 images (0 to 255 for 0 to 1), or patches of them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.uint8 and x.shape[1] == self.in_channels:
            return super().forward(x)
        assert self.bias is not None
        sums, scale = self.conv_without_bias(x)
        return torch.add(self.bias[:, None, None], sums, alpha=scale)

    def conv_without_bias(self, x: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Convolution of x without its bias, channels last, and the factor to multiply it by.

        The factor 1/255 applies to the sums, since bytes are exact in bfloat16 and their quotients are not.
        """
        if x.dtype == torch.uint8:
            x = bytes_to_patches(x, self.stride[0], self.weight.dtype)
        elif x.shape[1] == self.in_channels:
            return F.conv2d(x, self.weight, stride=self.stride), 1.0
        return F.conv2d(x, space_to_depth_weights(self.weight, self.stride[0])), 1 / 255


def space_to_depth_weights(weight: torch.Tensor, stride: int) -> torch.Tensor:
    """Weights [O, C, k, k] of the equivalent convolution over patches: [O, C · s · s, k/s, k/s], channels last."""
    features, channels, side = weight.shape[0], weight.shape[1], weight.shape[2] // stride
    patches = weight.unflatten(3, (side, stride)).unflatten(2, (side, stride)).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(features, side, side, channels * stride * stride).permute(0, 3, 1, 2)
