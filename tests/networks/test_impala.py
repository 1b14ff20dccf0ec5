"""The residual torso: its shapes, its width, spectral norm and pooling."""

import copy

import pytest
import torch
from torch import nn

from qfleet.networks.spectral_norm import SpectralConv2d
from qfleet.networks.torsos import find_torso, impala
from qfleet.optim.flat_params import Flat

ATARI = (4, 84, 84)


def test_the_papers_network():
    torso = impala.build(ATARI, "none")
    assert sum(isinstance(layer, nn.Conv2d) for layer in torso.modules()) == 15
    assert torso(torch.zeros(2, *ATARI)).shape == (2, 32 * 11 * 11)


def test_width_pooling_and_any_size():
    assert impala.build(ATARI, "none", width=2, pool=6)(torch.zeros(1, *ATARI)).shape == (1, 64 * 36)
    assert impala.build((1, 5, 7), "none")(torch.zeros(2, 1, 5, 7)).shape == (2, 32)
    assert impala.build((1, 5, 7), "none", pool=2)(torch.zeros(2, 1, 5, 7)).shape == (2, 128)


@pytest.mark.parametrize(("norm", "groups"), [("group", 16), ("layer", 1)])
def test_norms_come_before_every_relu(norm, groups):
    torso = impala.build(ATARI, norm)
    relus = [layer for layer in torso.modules() if isinstance(layer, nn.ReLU)]
    norms = [layer for layer in torso.modules() if isinstance(layer, nn.GroupNorm)]
    assert len(norms) == len(relus) == 13 and all(layer.num_groups == groups for layer in norms)


def largest(layer):
    return torch.linalg.matrix_norm(layer.weight.detach().flatten(1), 2)


def test_the_spectral_norm_of_residual_convolutions_is_one():
    torch.manual_seed(0)
    torso = impala.build((1, 12, 12), "none", spectral=True)
    convs = [layer for layer in torso.modules() if isinstance(layer, SpectralConv2d)]
    assert len(convs) == 12, "those of the residual blocks, not the first of each stage"
    layer = convs[0]
    layer.weight.data.mul_(7)
    x = torch.randn(3, 16, 6, 6)
    for _ in range(500):
        layer(x)
    expected = nn.functional.conv2d(x, layer.weight / largest(layer), layer.bias, padding=1)
    assert torch.allclose(layer(x), expected, atol=1e-4)


def test_the_singular_vector_moves_in_training_only_and_travels_with_the_weights():
    torch.manual_seed(0)
    layer, x = SpectralConv2d(2, 4, 3, padding=1), torch.randn(1, 2, 5, 5)
    layer.weight.data.normal_()
    acting = copy.deepcopy(layer).eval()
    before = acting.u.clone()
    acting(x)
    assert torch.equal(acting.u, before)
    trained = Flat(layer)
    layer(x)
    assert not torch.equal(layer.u, before)
    seen = Flat(acting.requires_grad_(False))
    seen.load(trained.state())
    assert torch.equal(acting.u, layer.u)


def test_gradients_pass_through_the_norm_and_later_passes_do_not_disturb_them():
    torch.manual_seed(0)
    plain = SpectralConv2d(1, 3, 3)
    value = plain(torch.randn(2, 1, 4, 4)).sum()
    plain(torch.randn(2, 1, 4, 4))
    value.backward()
    assert plain.weight.grad.isfinite().all()
    # scaling all weights changes nothing, so the gradient has no part along them
    along = (plain.weight.grad * plain.weight).sum()
    assert abs(along.item()) < 1e-3 * plain.weight.grad.norm().item() * plain.weight.norm().item()


def test_it_computes_in_bfloat16():
    flat = Flat(impala.build((1, 12, 12), "none", spectral=True, pool=2), torch.bfloat16)
    assert flat.net(torch.zeros(2, 1, 12, 12, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert all(value.dtype == torch.float32 for value in flat.state().values())


def test_the_efficient_torso_is_the_papers():
    assert find_torso("efficient")(ATARI, "none")(torch.zeros(1, *ATARI)).shape == (1, 64 * 3 * 3)
