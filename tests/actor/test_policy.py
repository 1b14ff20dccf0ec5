"""Those who act: evaluation mode, seeds of their own, and saved generators across devices."""

import dataclasses

import numpy as np
import torch
from fakes import linear_agent
from torch import nn

from qfleet.actor.policy import Policy
from qfleet.core.agent import Decision, ExplorationParams
from qfleet.core.rng import restore_rng
from qfleet.core.seeds import lane_seeds, seed_for


def test_acting_draws_no_dropout_and_moves_no_statistics():
    def act(net, obs, memory, arm, rng):
        return Decision(net(obs["obs"])[:, 0])

    agent = dataclasses.replace(linear_agent(), act=act, network=lambda: nn.Sequential(
        nn.Linear(1, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1)))
    policy = Policy(agent, 0, torch.device("cpu"))
    before = policy.flat.state()
    answers = {
        policy.act({"obs": np.ones((1, 1), np.float32)}, ExplorationParams(torch.zeros(1)))[0].item() for _ in range(10)
    }
    assert len(answers) == 1
    assert all(torch.equal(value, before[name]) for name, value in policy.flat.state().items())


def test_a_generator_goes_on_or_on_another_device_begins_from_its_state():
    rng = torch.Generator().manual_seed(3)
    torch.rand(5, generator=rng)
    state = rng.get_state()
    expected = torch.rand(3, generator=rng)
    restore_rng(rng, state)
    assert torch.equal(torch.rand(3, generator=rng), expected)
    restore_rng(rng, torch.arange(16, dtype=torch.uint8))
    first = torch.rand(3, generator=rng)
    restore_rng(rng, torch.arange(16, dtype=torch.uint8))
    assert torch.equal(torch.rand(3, generator=rng), first)


def test_seeds_do_not_collide():
    seeds = [seed_for(1, "learner"), seed_for(1, "network"), seed_for(2, "learner"), *lane_seeds(1, 50, "begin", 0),
             *lane_seeds(1, 50, "exact", 0), *lane_seeds(1, 50, "exact", 1)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_a_choice_does_not_depend_on_where_observations_lie():
    """An environment may hand out views of a buffer of its own, which begin anywhere."""
    def act(net, obs, memory, arm, rng):
        return Decision(net(obs["obs"]).sum(1), extras={"q": net(obs["obs"])})

    agent = dataclasses.replace(linear_agent(), act=act, network=lambda: nn.Linear(50, 16))
    policy, buffer = Policy(agent, 0, torch.device("cpu")), np.zeros(116, np.float32)
    obs = np.random.default_rng(0).normal(size=(2, 50)).astype(np.float32)
    answers = set()
    for start in range(16):
        shown = buffer[start:start + 100].reshape(2, 50)
        shown[:] = obs
        answers.add(policy.act({"obs": shown}, ExplorationParams(torch.zeros(2)))[1]["q"].tobytes())
    assert len(answers) == 1
