"""A convolution by patches is the convolution of the same weights."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from qfleet.accel.kernels.images import bytes_to_patches, space_to_depth
from qfleet.networks.patch_conv import SpaceToDepthConv2d


@pytest.mark.parametrize(("kernel", "stride", "high", "wide", "channels"),
                         [(8, 4, 84, 84, 4), (8, 4, 85, 87, 3), (8, 8, 64, 72, 1), (4, 4, 40, 44, 12)])
def test_by_patches_is_the_same_function_and_has_the_same_gradient(kernel, stride, high, wide, channels):
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(256, (3, channels, high, wide), dtype=torch.uint8, generator=rng)
    conv = SpaceToDepthConv2d(channels, 5, kernel, stride).double()
    usual = F.conv2d(x.double() / 255, conv.weight, conv.bias, stride)
    found = conv(x)
    assert torch.equal(conv(bytes_to_patches(x, stride, torch.float64)), found)
    torch.testing.assert_close(found, usual, rtol=1e-12, atol=1e-12)
    assert found.is_contiguous(memory_format=torch.channels_last)
    slope = torch.randn(usual.shape, generator=rng, dtype=torch.float64)
    for one, other in zip(torch.autograd.grad(usual, [conv.weight, conv.bias], slope),
                          torch.autograd.grad(found, [conv.weight, conv.bias], slope), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_bytes_are_exact_in_bfloat16():
    x = torch.arange(256, dtype=torch.uint8).repeat(25).view(1, 1, 80, 80)
    conv = SpaceToDepthConv2d(1, 1, 8, 4).bfloat16()
    nn.init.ones_(conv.weight)
    nn.init.zeros_(conv.bias)
    usual = F.conv2d(x.double() / 255, conv.weight.double(), None, 4)
    found = conv(space_to_depth(x, 4).bfloat16())
    torch.testing.assert_close(found.double(), usual, rtol=2**-6, atol=0)
    assert torch.equal(space_to_depth(x, 4).bfloat16().double().sum(), x.double().sum())


def test_other_numbers_are_convolved_as_usual():
    conv, x = SpaceToDepthConv2d(4, 2, 8, 4), torch.rand(2, 4, 84, 84)
    assert torch.equal(conv(x), F.conv2d(x, conv.weight, conv.bias, 4))
