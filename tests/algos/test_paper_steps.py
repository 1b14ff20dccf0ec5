"""Recipes with a paper's optimizer take the paper's steps: epsilon and clipping fit the scale of the loss.

An optimizer's epsilon is compared with gradients, so a paper's value belongs to the paper's loss. Here values q are the
weights themselves and every target is 0. The gradient of the recipe's own loss then goes to the recipe's own optimizer,
and the gradient of the paper's loss, written out, to the paper's; both must move q alike.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from qfleet.algos import dqn, r2d2
from qfleet.core.env import EnvSpec, Leaf
from qfleet.core.replay import Sample
from qfleet.optim.optimizer import Optimizer, OptimizerConfig
from qfleet.runconfig.resolution import resolve

SPEC = EnvSpec("toy", {"obs": Leaf((3,), "float32", "vector")}, num_actions=2)
STEPS = 5


def batch_of(items, rows, states):
    """Rewards and discounts of 0, action 0 everywhere, and no final row: every target is h(0) = 0."""
    zeros = torch.zeros(items, rows)
    found = {"obs.obs": torch.zeros(items, rows, 3), "action": zeros.int(), "reward": zeros, "discount": zeros,
             "last": zeros.bool()}
    found |= {name: torch.zeros(items, 1, *shape, dtype=getattr(torch, dtype))
              for name, (shape, dtype) in states.items()}
    return Sample(np.arange(items), torch.ones(items), found)


def moved(cfg, gradients):
    """How far weights have moved by these gradients, one after the other."""
    weights = torch.zeros_like(gradients[0])
    optimizer = Optimizer(cfg, weights)
    for gradient in gradients:
        optimizer.step(gradient.clone(), float(gradient.norm()))
    return weights


def errors_of(shape, size):
    """The errors of a few updates, of sizes that differ by some orders of magnitude."""
    rng = torch.Generator().manual_seed(0)
    return [size * torch.randn(shape, generator=rng) * 10 ** (2 * torch.rand(shape, generator=rng) - 2)
            for _ in range(STEPS)]


def same_steps(ours, theirs):
    assert ours.abs().max() > 0
    assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))


@pytest.mark.parametrize("recipe", ["r2d2", "r2d2-short"])
@pytest.mark.parametrize("size", [0.01, 1.0, 30.0])
def test_r2d2_moves_as_with_half_the_sum_of_squares(recipe, size):
    """SEED RL and Acme have 0.5 · Σ δ² over the rows of a sequence, with ε = 1e-3 and (SEED RL) gradients cut at 40."""
    config = resolve(recipe).config
    cfg = r2d2.Config(**{**config.agent.model_dump(), "features": (4,), "units": 4, "hidden": (4,)})
    agent, items = r2d2.build(cfg, SPEC), config.learner.batch_size
    batch = batch_of(items, cfg.window.length, agent.stored_states)

    def values(q):
        """A network whose values of the trained rows are q [B, U]; all others are 0."""
        def net(obs, side, real, state):
            rows = real.shape[1]
            if rows == cfg.burn_in:
                return torch.zeros(items, rows, 2), state
            taken = torch.cat([q, torch.zeros(items, rows - cfg.unroll)], 1)
            return torch.stack([taken, torch.zeros_like(taken)], 2), state
        return net

    ours, theirs = [], []
    for error in errors_of((items, cfg.unroll), size):
        q = error.clone().requires_grad_()
        loss = agent.loss(values(q), values(torch.zeros_like(q)), batch, torch.Generator())
        ours.append(torch.autograd.grad(loss.per_item.mean(), q)[0].flatten())
        theirs.append((error / items).flatten())
    paper = OptimizerConfig(learning_rate=1e-4, optimizer_eps=1e-3, clip_norm=40)
    same_steps(moved(config.learner, ours), moved(paper, theirs))


@pytest.mark.parametrize("size", [0.01, 1.0, 30.0])
def test_nature_dqn_moves_as_with_the_sum_of_the_batch(size):
    """NeuralQLearner.lua sums the clipped errors of 32 items, with 0.01 under the root of centred RMSProp."""
    config = resolve("fastdqn").config
    agent, items = dqn.build(dqn.Config(double=False, hidden=(4,)), SPEC), config.learner.batch_size
    batch = batch_of(items, agent.window.length, {})

    class Net:
        encoder = SimpleNamespace(prepare=lambda obs: obs)

        def __init__(self, q):
            self.q = q

        def __call__(self, obs, noise):
            return torch.stack([self.q, torch.zeros_like(self.q)], 1)

    ours, theirs = [], []
    for error in errors_of((items,), size):
        q = error.clone().requires_grad_()
        loss = agent.loss(Net(q), Net(torch.zeros_like(q)), batch, torch.Generator())
        ours.append(torch.autograd.grad(loss.per_item.mean(), q)[0])
        theirs.append(error.clamp(-1, 1))
    paper = OptimizerConfig(optimizer="rmsprop", learning_rate=2.5e-4, optimizer_eps=0.01, clip_norm=0)
    same_steps(moved(config.learner, ours), moved(paper, theirs))
