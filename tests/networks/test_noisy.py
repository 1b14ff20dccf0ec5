"""Noisy layers: the paper's formula, whose noise is whose, and that the mean is what evaluation sees."""

import numpy as np
import pytest
import torch

from qfleet.actor.policy import Policy
from qfleet.algos import c51, dqn, hlgauss, iqn, qr
from qfleet.core.agent import ExplorationParams
from qfleet.core.env import EnvSpec, Leaf
from qfleet.networks.noisy import Noise, NoisyLinear

SPEC = EnvSpec("toy", {"obs": Leaf((3,), "float32", "vector")}, num_actions=4)
ALGOS = {"dqn": dqn, "c51": c51, "hlgauss": hlgauss, "qr": qr, "iqn": iqn}


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def test_initial_values_are_the_papers():
    layer = NoisyLinear(100, 7, 0.5)
    assert layer.weight.abs().max() <= 0.1 and layer.bias.abs().max() <= 0.1 and layer.weight.std() > 0.04
    assert torch.allclose(layer.sigma_weight, torch.full((7, 100), 0.05))
    assert torch.allclose(layer.sigma_bias, torch.full((7,), 0.05))


def test_a_pass_equals_the_formula_with_the_weights_built():
    torch.manual_seed(0)
    layer, x = NoisyLinear(5, 3, 0.5), torch.randn(8, 5)
    f = [e.sign() * e.abs().sqrt() for e in (torch.randn(1, size, generator=g) for g in [rng(4)] for size in (5, 3))]
    inner, outer = f[0][0], f[1][0]
    weight = layer.weight + layer.sigma_weight * torch.outer(outer, inner)
    expected = x @ weight.t() + layer.bias + layer.sigma_bias * outer
    assert torch.allclose(layer(x, Noise(rng(4))), expected, atol=1e-6)
    assert torch.allclose(layer(x, None), x @ layer.weight.t() + layer.bias, atol=1e-6)


def test_noise_may_be_everybodys_own_and_has_the_mean_in_its_middle():
    torch.manual_seed(0)
    layer, x = NoisyLinear(5, 3, 0.5), torch.randn(1, 5).expand(4000, 5)
    assert layer(x, Noise(rng())).std(0).max() < 1e-6, "one draw for all"
    own = layer(x, Noise(rng(), 4000))
    assert own.std(0).min() > 0.1
    assert torch.allclose(own.mean(0), layer(x[0], None), atol=0.03)


def test_draws_fit_any_rank_and_dtype():
    layer = NoisyLinear(5, 3, 0.5).bfloat16()
    assert layer(torch.zeros(2, 7, 5, dtype=torch.bfloat16), Noise(rng(), 2)).dtype == torch.bfloat16
    assert layer(torch.zeros(2, 7, 5), Noise(rng())).dtype == torch.float32


@pytest.mark.parametrize("algo", ALGOS)
def test_actors_are_noisy_step_by_step_and_lane_by_lane_and_evaluation_is_not(algo):
    module = ALGOS[algo]
    agent = module.build(module.Config(hidden=(8,), noisy=True, noisy_sigma=3), SPEC)
    policy = Policy(agent, 0, torch.device("cpu"))
    obs = {"obs": np.ones((6, 3), np.float32)}

    def law(noise):
        return policy.act(obs, ExplorationParams(torch.zeros(6), noise))[1]["distribution"]

    first, second = law(True), law(True)
    assert not np.allclose(first, second), "resampled for every step"
    if algo != "iqn":  # whose levels are random as well
        assert not np.allclose(first[0], first[1]), "lanes have noise of their own"
        quiet = law(False)
        assert np.allclose(quiet, law(False)) and np.allclose(quiet[0], quiet[1])
