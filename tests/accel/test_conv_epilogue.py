"""Bias, LayerNorm and ReLU by one kernel are those of torch, and so is their gradient, in bfloat16 and for all shapes.

The kernels run on the CPU, as in `emulated`; what calls them is the code that calls them on a GPU.
"""

from __future__ import annotations

import pytest
import torch
from kernel_emulator import together
from torch import nn
from torch.nn import functional as F

from qfleet.accel.kernels import bf16
from qfleet.accel.kernels.conv_epilogue import fused_epilogue
from qfleet.accel.kernels.conv_epilogue_source import EPILOGUE_SOURCE, channels_supported
from qfleet.networks import heads
from qfleet.networks.norms import ImageLayerNorm
from qfleet.networks.torsos import nature

SHORTS = "unsigned short"
SIGNATURES = {
    "finish": f"{SHORTS}* x, {SHORTS}* out, {SHORTS}* b, {SHORTS}* w, {SHORTS}* s, float* stats, int channels, "
              "int pixels, int flags, double scale, double eps",
    "unfinish": f"{SHORTS}* dy, {SHORTS}* x, {SHORTS}* dx, float* parts, {SHORTS}* b, {SHORTS}* w, {SHORTS}* s, "
                "float* stats, int channels, int pixels, int flags, double scale"}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return together(tmp_path_factory.mktemp("finish"), EPILOGUE_SOURCE, SIGNATURES)


@pytest.fixture
def swift(kernels, monkeypatch):
    """What a GPU has, here."""
    monkeypatch.setattr(bf16, "compile_kernel", lambda name, source: kernels[name])
    for module in (nature, heads):
        monkeypatch.setattr(module, "can_fuse_epilogue", lambda weight, channels: channels_supported(channels))


def usual(x, bias, norm, scale, planar):
    """The same in float32."""
    v = x.float() * scale + (0 if bias is None else bias.float().view(1, -1, *[1] * (x.ndim - 2)))
    if norm is not None:
        wide = (1, -1, *[1] * (x.ndim - 2))
        v = F.layer_norm(v, v.shape[1:], eps=norm.eps) * norm.weight.float().view(wide) + norm.bias.float().view(wide)
    return F.relu(v).flatten(1) if planar else F.relu(v)


@pytest.mark.parametrize("planar", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(3, 32, 20, 20), (2, 64, 7, 7), (2, 8, 1, 3), (3, 512), (2, 2048)])
def test_values_and_gradients_are_torchs(swift, shape, biased, normed, planar):
    torch.manual_seed(0)
    if len(shape) == 2 and planar:
        shape = (*shape, 1, 1)
    channels = shape[1]
    x = (3 * torch.randn(shape) + 1).bfloat16()
    x = x.to(memory_format=torch.channels_last) if x.ndim == 4 else x
    bias = torch.randn(channels).bfloat16() if biased else None
    norm = ImageLayerNorm(channels) if normed else None
    if norm is not None:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
        norm = norm.bfloat16()
    leaves = [each.requires_grad_() for each in (x, bias, *(norm.parameters() if norm else ())) if each is not None]

    found, wanted = fused_epilogue(x, bias, norm, 0.25, planar), usual(x, bias, norm, 0.25, planar)
    assert found.shape == wanted.shape and found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), wanted, rtol=2**-7, atol=1e-3)
    slope = torch.randn(wanted.shape)
    mine = torch.autograd.grad(found, leaves, slope.bfloat16())
    its = torch.autograd.grad(wanted, leaves, slope.bfloat16().float())
    for one, other in zip(mine, its, strict=True):
        assert one.dtype == torch.bfloat16
        size = float(other.float().std()) + 0.01
        torch.testing.assert_close(one.float(), other.float(), rtol=2**-6, atol=0.02 * size)


def test_what_is_not_a_number_goes_through(swift):
    x = torch.ones(2, 8)
    x[1, 3] = torch.nan
    out = fused_epilogue(x.bfloat16(), None, None)
    assert out[0].isfinite().all() and out[1, 3].isnan() and out[1, :3].isfinite().all()
    assert fused_epilogue(x.bfloat16(), None, nn.LayerNorm(8).bfloat16())[1].isnan().all()
    assert fused_epilogue(torch.full((1, 8), torch.inf).bfloat16(), None, None).isinf().all()


@pytest.mark.parametrize("norm", ["none", "layer"])
def test_the_torso_is_the_same_function_at_once_and_layer_by_layer(swift, monkeypatch, norm):
    torch.manual_seed(0)
    torso = nature.build((4, 84, 84), norm).to(torch.bfloat16)
    pictures = torch.randint(256, (3, 4, 84, 84), dtype=torch.uint8)
    at_once = torso(pictures)
    slope = torch.randn(at_once.shape).bfloat16()
    mine = torch.autograd.grad(at_once, list(torso.parameters()), slope)
    monkeypatch.setattr(nature, "can_fuse_epilogue", lambda weight, channels: False)
    exact = torso.float()
    wanted = exact(pictures)
    most = float(wanted.detach().abs().max())
    assert at_once.shape == wanted.shape
    torch.testing.assert_close(at_once.float(), wanted, rtol=0.05, atol=0.02 * most)
    for one, other in zip(mine, torch.autograd.grad(wanted, list(exact.parameters()), slope.float()), strict=True):
        assert torch.cosine_similarity(one.float().flatten(), other.flatten(), 0) > 0.99


def test_groups_are_left_to_torch(swift, monkeypatch):
    monkeypatch.setattr(nature, "fused_epilogue", lambda *args, **kwargs: pytest.fail("it knows no groups"))
    assert nature.build((4, 84, 84), "group")(torch.rand(1, 4, 84, 84)).shape == (1, 3136)


def test_dense_layers_with_a_norm_are_the_same_at_once(swift, monkeypatch):
    torch.manual_seed(0)
    head = heads.Head(32, (64, 16), (3,), "layer").bfloat16()
    x = torch.randn(5, 32).bfloat16()
    at_once = head(x)
    monkeypatch.setattr(heads, "can_fuse_epilogue", lambda weight, channels: False)
    torch.testing.assert_close(at_once, head(x), rtol=0.02, atol=0.02)


@pytest.mark.parametrize(("channels", "fits"), [(32, True), (64, True), (2048, True), (6, False), (48, False),
                                                (4096, False)])
def test_which_channels_fit(channels, fits):
    assert channels_supported(channels) is fits
