"""On a GPU, every kernel of our own does what plain torch does, compiled by NVRTC as in training.

Kernels add in float32 and round once to bfloat16, whose last bit is 2**-8 of a value; torch's chains of kernels round
between operations. Both are compared with float32.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from gpu_learners import GPU
from test_conv_epilogue import usual
from torch import nn

from qfleet.accel.kernels import bf16, conv_epilogue, images, kernel_compiler, value_head
from qfleet.accel.kernels.adam import AdamRule, AdamState, fused_adam
from qfleet.accel.kernels.aligned import scatter_index
from qfleet.accel.kernels.conv_epilogue import can_fuse_epilogue, fused_epilogue
from qfleet.accel.kernels.gradients import gather_bf16
from qfleet.accel.kernels.images import bytes_to_patches, channels_last_layer_norm, image_layer_norm, space_to_depth
from qfleet.accel.kernels.value_head import can_fuse_head
from qfleet.accel.kernels.value_head_source import ITEMS_PER_PARTIAL_SUM, MAX_ACTIONS
from qfleet.networks.heads import DuelingHead, Head
from qfleet.networks.norms import ImageLayerNorm
from qfleet.networks.torsos import nature
from qfleet.optim.flat_params import Flat

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


# Helpers.

def test_bf16_values_are_rounded_as_torch_rounds_them():
    """Every upper half of a float32, with lower halves at, beside and between the rounding borders."""
    upper = torch.arange(1 << 16, dtype=torch.int64) << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (upper[:, None] + lower).flatten()
    values = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32).to(GPU)
    found, wanted = bf16.sum_rows_bf16(values[None]), values.bfloat16()
    nan = wanted.isnan()
    assert torch.equal(found.isnan(), nan)
    # A sum starts at +0, so −0 becomes +0.
    assert torch.equal(found[~nan], wanted[~nan]) and int(nan.sum()) > 1000


@pytest.mark.parametrize(("rows", "shape"), [(1, (7,)), (33, (3, 64)), (1000, (1, 512)), (32, (9,))])
def test_rows_are_added_in_float32(rows, shape):
    parts = torch.randn(rows, *shape, device=GPU)
    found, wanted = bf16.sum_rows_bf16(parts), parts.double().sum(0)
    assert found.dtype == torch.bfloat16 and found.shape == wanted.shape
    torch.testing.assert_close(found.double(), wanted, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize(("items", "channels", "high", "wide"), [(1, 1, 4, 4), (3, 4, 84, 84), (2, 3, 8, 12)])
def test_bytes_become_patches(items, channels, high, wide):
    x = torch.randint(256, (items, channels, high, wide), dtype=torch.uint8, device=GPU)
    found = bytes_to_patches(x, 4, torch.bfloat16)
    assert torch.equal(found, space_to_depth(x, 4).bfloat16())
    assert torch.equal(found.cpu(), bytes_to_patches(x.cpu(), 4, torch.bfloat16))


@pytest.mark.parametrize("order", ["given", "transposed"])
def test_gradients_are_joined_in_the_order_of_the_weights(order):
    net = nn.Sequential(nn.Conv2d(3, 5, 2), nn.Conv2d(5, 4, 1), nn.Linear(7, 6), nn.Linear(61, 700)).to(GPU)
    flat = Flat(net, torch.bfloat16)
    grads = [torch.randn(parameter.shape, device=GPU).bfloat16() for parameter in net.parameters()]
    grads[0] = grads[0].to(memory_format=torch.channels_last)
    if order == "transposed":
        grads[4] = torch.randn(7, 6, device=GPU).bfloat16().T
    wanted = torch.cat([grad.float().reshape(-1) for grad in grads])
    assert torch.equal(flat.gather(grads), wanted)
    assert gather_bf16(grads, list(flat.shapes.values()), flat.grad)
    assert not gather_bf16([None, *grads[1:]], list(flat.shapes.values()), flat.grad)
    assert torch.equal(flat.gather([None, *grads[1:]])[grads[0].numel():], wanted[grads[0].numel():])


@pytest.mark.parametrize("clip", [0.0, 0.5, 1e3])
@pytest.mark.parametrize("rounding", [False, True])
def test_adam_steps_and_rounds_as_torch_does(clip, rounding):
    shapes = [torch.Size(shape) for shape in ((32, 4, 2, 2), (32,), (6, 7), (6,), (700, 513))]
    indices = scatter_index(shapes).to(GPU)
    n = len(indices)
    weights = torch.randn(n, device=GPU)
    state = AdamState(weights, torch.zeros_like(weights), torch.zeros_like(weights), torch.zeros((), device=GPU))
    twin = [each.clone() for each in state]
    data = torch.full((int(indices.max()) + 9,), 7, dtype=torch.bfloat16, device=GPU)
    rule, ok = AdamRule(1e-2, 0.9, 0.999, 1e-5, clip), torch.tensor(True, device=GPU)
    for _ in range(4):
        gradient = torch.randn(n, device=GPU)
        norm = gradient.norm()
        state.steps.add_(1)
        twin[3].add_(1)
        assert fused_adam(state, gradient, norm, ok, rule, (data, indices) if rounding else None)
        clipped = gradient * min(1.0, clip / (float(norm) + 1e-6)) if clip else gradient
        torch._fused_adam_([twin[0]], [clipped], [twin[1]], [twin[2]], [], [twin[3]], amsgrad=False, lr=1e-2, beta1=0.9,
                           beta2=0.999, weight_decay=0.0, eps=1e-5, maximize=False, grad_scale=None, found_inf=None)
    # torch computes 1 − β₂ in float32, which is off by up to 2**-24 / 0.001 of its value; the kernel in float64.
    for mine, its, (rtol, atol) in zip(state[:3], twin[:3], ((1e-5, 1e-5), (1e-5, 1e-7), (6e-5, 1e-10)), strict=True):
        torch.testing.assert_close(mine, its, rtol=rtol, atol=atol)
    if rounding:
        assert torch.equal(data[indices.long()], weights.bfloat16())
    before = weights.clone()
    assert fused_adam(state, gradient, norm, ~ok, rule, (data, indices) if rounding else None)
    assert torch.equal(weights, before)


# Layers.

@pytest.mark.parametrize("planar", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(300, 32, 20, 20), (2, 64, 7, 7), (2, 8, 1, 3), (3, 512), (200, 2048)])
def test_epilogues_and_their_gradients_are_torchs(shape, biased, normed, planar):
    if len(shape) == 2 and planar:
        shape = (*shape, 1, 1)
    channels = shape[1]
    x = (3 * torch.randn(shape, device=GPU) + 1).bfloat16()
    x = x.to(memory_format=torch.channels_last) if x.ndim == 4 else x
    bias = torch.randn(channels, device=GPU).bfloat16() if biased else None
    norm = ImageLayerNorm(channels).to(GPU) if normed else None
    if norm is not None:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
        norm = norm.bfloat16()
    assert can_fuse_epilogue(torch.zeros(1, device=GPU).bfloat16(), channels)
    leaves = [each.requires_grad_() for each in (x, bias, *(norm.parameters() if norm else ())) if each is not None]

    found, wanted = fused_epilogue(x, bias, norm, 0.25, planar), usual(x, bias, norm, 0.25, planar)
    assert found.shape == wanted.shape and found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), wanted, rtol=2**-7, atol=1e-3)
    slope = torch.randn(wanted.shape, device=GPU)
    mine = torch.autograd.grad(found, leaves, slope.bfloat16())
    its = torch.autograd.grad(wanted, leaves, slope.bfloat16().float())
    for one, other in zip(mine, its, strict=True):
        assert one.dtype == torch.bfloat16
        size = float(other.float().std()) + 0.01
        torch.testing.assert_close(one.float(), other.float(), rtol=2**-6, atol=0.02 * size)


def test_nan_and_infinity_go_through_an_epilogue():
    x = torch.ones(2, 8, device=GPU)
    x[1, 3] = torch.nan
    out = fused_epilogue(x.bfloat16(), None, None)
    assert out[0].isfinite().all() and out[1, 3].isnan() and out[1, :3].isfinite().all()
    assert fused_epilogue(x.bfloat16(), None, nn.LayerNorm(8).to(GPU).bfloat16())[1].isnan().all()
    assert fused_epilogue(torch.full((1, 8), torch.inf, device=GPU).bfloat16(), None, None).isinf().all()


@pytest.mark.parametrize("kind", [Head, DuelingHead])
@pytest.mark.parametrize(("items", "actions", "hidden"), [
    (1, 2, ()), (ITEMS_PER_PARTIAL_SUM + 5, 6, ()), (300, 18, (16,)), (3, MAX_ACTIONS, (8,))])
def test_value_heads_and_their_gradients_are_torchs(kind, items, actions, hidden):
    head = kind(24, hidden, (actions,), "none").to(GPU).bfloat16()
    x = torch.randn(items, 24, device=GPU).bfloat16()
    assert can_fuse_head(x, head.advantage.q if kind is DuelingHead and not hidden else nn.Linear(24, 3).to(x))
    (q, grads), (q_exact, grads_exact) = (values_and_gradients(net, x) for net in (head, copy.deepcopy(head).float()))
    assert q.dtype == torch.float32
    torch.testing.assert_close(q, q_exact, rtol=1e-5 if not hidden else 0.03, atol=1e-5 if not hidden else 0.01)
    for mine, its in zip(grads, grads_exact, strict=True):
        assert mine.dtype == torch.bfloat16 and mine.shape == its.shape
        torch.testing.assert_close(mine.float(), its, rtol=2**-7 if not hidden else 0.1,
                                   atol=4e-3 if not hidden else 0.02 * float(its.abs().max()) + 0.02)


def values_and_gradients(net, x):
    x = x.to(next(net.parameters()).dtype).requires_grad_()
    q = net(x)
    slope = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(q)
    return q, torch.autograd.grad(q, [x, *net.parameters()], slope)


def test_image_layer_norm_is_that_of_a_cpu():
    x = torch.randn(5, 16, 7, 6)
    norm = ImageLayerNorm(16)
    nn.init.normal_(norm.weight)
    on_gpu = image_layer_norm(x.to(GPU), norm.weight.to(GPU), norm.bias.to(GPU), norm.eps)
    torch.testing.assert_close(on_gpu.cpu(), norm(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(channels_last_layer_norm(x, norm.weight, norm.bias, norm.eps), norm(x))


@pytest.mark.parametrize("norm", ["none", "layer"])
@pytest.mark.parametrize("part", ["torso", "head"])
def test_layers_with_our_kernels_are_as_near_to_float32_as_those_of_torch(monkeypatch, part, norm):
    """Values and all gradients of the network of Pong at batch 512."""
    pixels = torch.randint(256, (512, 4, 84, 84), dtype=torch.uint8, device=GPU)
    features = torch.randn(512, 3136, device=GPU).relu()
    exact = nature.build((4, 84, 84), norm) if part == "torso" else DuelingHead(3136, (512,), (6,), norm)
    exact = exact.to(GPU, memory_format=torch.channels_last)
    rounded, x = copy.deepcopy(exact).bfloat16(), pixels if part == "torso" else features

    def results(net):
        out = net(x if x.dtype == torch.uint8 else x.to(next(net.parameters()).dtype))
        slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
        return [out.detach().float(), *(g.float() for g in torch.autograd.grad(out, list(net.parameters()), slope))]

    wanted = results(exact)
    weight = next(rounded.parameters())
    assert can_fuse_epilogue(weight, 32) and can_fuse_head(torch.zeros(1, 8).to(weight), nn.Linear(8, 3).to(weight))
    ours = [float((mine - its).norm() / its.norm()) for mine, its in zip(results(rounded), wanted, strict=True)]
    for module in (bf16, images):
        monkeypatch.setattr(module, "custom_kernels_allowed", lambda: False)
    torchs = [float((mine - its).norm() / its.norm()) for mine, its in zip(results(rounded), wanted, strict=True)]
    assert not can_fuse_epilogue(weight, 32) and np.isfinite(ours).all()
    assert all(mine <= 0.002 + 1.5 * its for mine, its in zip(ours, torchs, strict=True)), (ours, torchs)


def test_all_kernels_compile_here():
    assert all(kernel_compiler.compile_kernel(name) is not None for name in kernel_compiler.SOURCES)
    weight = torch.zeros(1, device=GPU).bfloat16()
    assert bf16.kernels_available(weight, conv_epilogue.EPILOGUE_SOURCE, "finish", "unfinish")
    assert bf16.kernels_available(weight, value_head.HEAD_SOURCE, "rate", "unrate", "weigh")
