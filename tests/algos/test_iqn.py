"""IQN's own parts: the network of the paper's formula by a naive loop, and levels that are uniform and always new."""

import itertools
import math

import pytest
import torch
from family_kit import SPEC, agent, batch_of, config, twins

from qfleet.algos.iqn import QuantileNetwork, sample_taus

ITEMS, LEVELS = 4, 5


def linear(layer, x):
    weight, bias = layer.weight.tolist(), layer.bias.tolist()
    return [sum(w * v for w, v in zip(row, x, strict=True)) + b for row, b in zip(weight, bias, strict=True)]


def relu(x):
    return [max(v, 0.0) for v in x]


def dense(layers, x):
    """Hidden layers in turn, each with its ReLU."""
    for layer in layers:
        if isinstance(layer, torch.nn.Linear):
            x = relu(linear(layer, x))
    return x


def naive(net, obs, tau):
    """Z_τ(s, ·) = f(ψ(s) ⊙ φ(τ)) of one observation and one level, φ(τ) = ReLU(linear(cos πiτ)), in plain floats."""
    psi = dense(net.body, obs)
    phi = relu(linear(net.level, [math.cos(math.pi * i * tau) for i in range(net.cosines)]))
    x = [a * b for a, b in zip(psi, phi, strict=True)]
    if not hasattr(net.head, "advantage"):
        return linear(net.head.q, dense(net.head.hidden, x))
    (value,) = linear(net.head.value.q, dense(net.head.value.hidden, x))
    advantage = linear(net.head.advantage.q, dense(net.head.advantage.hidden, x))
    return [value + a - sum(advantage) / len(advantage) for a in advantage]


@pytest.mark.parametrize("hidden", [(), (8,), (7, 6), (7, 6, 5)])
@pytest.mark.parametrize("dueling", [False, True])
def test_the_network_equals_a_naive_loop(hidden, dueling):
    torch.manual_seed(2)
    net = QuantileNetwork(config("iqn", hidden=hidden, dueling=dueling, cosines=9), SPEC).double()
    rng = torch.Generator().manual_seed(5)
    obs = torch.randn(ITEMS, 3, generator=rng).double()
    tau = torch.rand(ITEMS, LEVELS, generator=rng).double()
    found = net({"obs": obs}, tau, None)
    assert found.shape == (ITEMS, SPEC.num_actions, LEVELS)
    for item, level in itertools.product(range(ITEMS), range(LEVELS)):
        expected = naive(net, obs[item].tolist(), tau[item, level].item())
        assert found[item, :, level].tolist() == pytest.approx(expected, abs=1e-6), "the output alone is float32"


def test_levels_are_uniform():
    tau = sample_taus(1000, 100, torch.Generator().manual_seed(0)).double()
    assert tau.shape == (1000, 100) and tau.min() >= 0 and tau.max() < 1
    assert tau.mean().item() == pytest.approx(1 / 2, abs=0.005)
    assert tau.var().item() == pytest.approx(1 / 12, abs=0.002)
    shares = torch.histc(tau, 10, 0, 1) / tau.numel()
    assert torch.allclose(shares, torch.full((10,), 0.1).double(), atol=0.005)


def test_every_item_and_every_draw_has_levels_of_its_own():
    rng = torch.Generator().manual_seed(0)
    first, second = sample_taus(50, 8, rng), sample_taus(50, 8, rng)
    assert len(torch.cat([first, second]).unique(dim=0)) == 100
    assert torch.equal(first, sample_taus(50, 8, torch.Generator().manual_seed(0))), (
        "the generator decides, nothing else"
    )


@pytest.mark.parametrize("switches", [{"double": True}, {"double": False}, {"munchausen": True, "double": False}])
def test_no_two_passes_of_an_update_share_levels(switches):
    made = agent("iqn", **switches)
    net, target = twins(made)
    passes, rng = [], torch.Generator().manual_seed(0)
    for module in (net, target):
        module.register_forward_hook(lambda module, args, out: passes.append(args[1]))
    for _ in range(2):
        made.loss(net, target, batch_of(2), rng)
    assert len(passes) == (4 if switches == {"double": False} else 6), "of two updates"
    drawn = torch.cat([tau.flatten() for tau in passes])
    assert len(drawn.unique()) == len(drawn)
