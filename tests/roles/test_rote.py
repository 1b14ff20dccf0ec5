"""A choice by rote equals the agent's own to the bit, and agents that cannot be recorded act as they are."""

import dataclasses
import logging

import numpy as np
import pytest
import torch
from fakes import linear_agent
from torch import nn

from qfleet.agent import Arm, Decision
from qfleet.algos import c51, dqn, iqn, qr
from qfleet.roles.policy import Policy
from qfleet.types import EnvSpec, Leaf

SPEC = EnvSpec("toy", {"obs": Leaf((3,), "float32", "vector"), "room": Leaf((1,), "int32", "category", (5,))}, 4)
CPU = torch.device("cpu")
AGENTS = {
    "dqn": (dqn, {}), "dueling": (dqn, {"dueling": True, "norm": "layer"}), "c51": (c51, {"noisy": True}),
    "qr": (qr, {"rescale": True}), "iqn": (iqn, {}),
}


def life(agent, capture, precision="fp32"):
    """Twelve choices in 1 lane or 3, with noise or without, and other weights halfway; all that came of them."""
    policy, rng, told = Policy(agent, 0, CPU, precision, capture), np.random.default_rng(0), []
    for step in range(12):
        if step == 6:
            policy.load({name: value + 0.1 for name, value in policy.flat.state().items()}, 1)
        lanes = 3 if step % 3 else 1
        obs = {"obs": rng.normal(size=(lanes, 3)).astype(np.float32), "room": rng.integers(0, 5, (lanes, 1), np.int32)}
        action, extras = policy.act(obs, Arm(torch.full((lanes,), step / 12), step % 4 > 0))
        told += [action.tolist(), {name: x.tolist() for name, x in extras.items()}, policy.rng.get_state().tolist()]
    return told, policy


@pytest.mark.parametrize("name", AGENTS)
def test_by_rote_equals_the_agent_itself_to_the_bit(name):
    algo, switches = AGENTS[name]
    agent = algo.build(algo.Config(hidden=(8, 8), **switches), SPEC)
    (plain, _), (rote, policy) = (life(agent, capture) for capture in (False, True))
    assert plain == rote
    plays = policy._choose._plays
    assert len(plays) == 4 and agent.act not in plays.values(), "all were recorded"


def test_in_bfloat16_too():
    agent = dqn.build(dqn.Config(hidden=(8, 8)), SPEC)
    assert life(agent, False, "bf16")[0] == life(agent, True, "bf16")[0]


def global_chance(net, obs, memory, arm, rng):
    return Decision(torch.rand(1))


def branching(net, obs, memory, arm, rng):
    return Decision(obs["obs"][:, 0] if obs["obs"].sum() > 0 else -obs["obs"][:, 0])


def greedy_branch(net, obs, memory, arm, rng):
    """At the first choice, all random, nobody sees what it does when it is not."""
    chosen = torch.where(torch.rand(len(arm.epsilon), generator=rng) < arm.epsilon, 0.0, obs["obs"][:, 0])
    return Decision(chosen if bool((arm.epsilon == 1).all()) else chosen + 1)


@pytest.mark.parametrize("act", [global_chance, branching, greedy_branch])
def test_what_cannot_be_recorded_acts_as_it_is(act, caplog):
    agent = dataclasses.replace(linear_agent(), act=act)
    answers = []
    for capture in (False, True):
        torch.manual_seed(0)
        policy = Policy(agent, 0, CPU, capture=capture)
        answers.append([policy.act({"obs": np.full((1, 1), value, np.float32)}, Arm(torch.zeros(1)))[0].tolist()
                        for value in (1, -1, 2)])
        said = [record.message for record in caplog.records if record.levelno == logging.WARNING]
        assert len(said) == capture and all("cannot be recorded" in message for message in said)
    assert answers[0] == answers[1]


def test_arms_with_more_than_an_epsilon_are_not_recorded():
    def act(net, obs, memory, arm, rng):
        return Decision(net(obs["obs"])[:, 0] + (arm.sigma if arm.sigma is not None else 0))

    agent = dataclasses.replace(linear_agent(), act=act, network=lambda: nn.Linear(1, 1))
    policy, obs = Policy(agent, 0, CPU, capture=True), {"obs": np.ones((1, 1), np.float32)}
    noisy = [policy.act(obs, Arm(torch.zeros(1), sigma=torch.full((1,), float(sigma))))[0].item() for sigma in (1, 2)]
    assert noisy[1] - noisy[0] == pytest.approx(1)
    assert not policy._choose._plays
