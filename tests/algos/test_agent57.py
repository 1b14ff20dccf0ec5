"""Agent57 by its parts: both networks see what the actor saw, learn their own rewards, and are mixed by arm."""

import dataclasses

import numpy as np
import pytest
import torch
from sequences import played
from test_ngu import SMALL, drawn, transitions

from qfleet.algos import agent57
from qfleet.algos.agent57 import Config, build
from qfleet.core.agent import ExplorationParams
from qfleet.core.env import EnvSpec, Leaf
from qfleet.maths.policy_family import betas
from qfleet.maths.value_rescaling import h, h_inverse

SPEC = EnvSpec("toy", {"obs": Leaf((3,), "float32", "vector")}, num_actions=4)


def config(**changes):
    return Config(**(SMALL | changes))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [{"memory": "lstm"}, {"memory": "none"}, {"memory": "lstm", "targets": "n_step"}])
def test_actor_and_learner_agree_on_priorities(kind):
    agent, policy, replay = played("toy/HiddenCartPole-v0", lambda spec: build(config(double=False, **kind), spec),
                                   explorer=drawn())
    sample, net = replay.sample(256), policy.flat.net
    wanted = agent.loss(net, net, sample, policy.rng).priority.detach().numpy()
    given = replay._priorities.tree.get(sample.keys)
    np.testing.assert_allclose(given, np.maximum(wanted, 1e-6), rtol=2e-3, atol=1e-4)
    assert kind["memory"] == "none" or not torch.equal(sample.rows["second.h"], sample.rows["state.h"])


@pytest.mark.parametrize("rescale", [True, False])
def test_values_are_mixed_by_the_arms_beta(rescale):
    family = agent57.PolicyFamily(config(rescale=rescale))
    q_e, q_i, arm = torch.randn(5, 4), torch.randn(5, 4), torch.arange(5)
    for j, beta in enumerate(betas(5, 0.3)):
        wanted = h(h_inverse(q_e[j]) + beta * h_inverse(q_i[j])) if rescale else q_e[j] + beta * q_i[j]
        torch.testing.assert_close(family.mix(q_e, q_i, arm)[j], wanted)


def test_each_network_learns_from_its_own_rewards():
    agent = build(config(memory="none", targets="n_step"), SPEC)
    torch.manual_seed(0)
    net, batch = agent.network(), transitions()

    def gradients(**columns):
        changed = dataclasses.replace(batch, rows=batch.rows | columns)
        net.zero_grad()
        agent.loss(net, net, changed, torch.Generator()).per_item.sum().backward()
        return [torch.cat([p.grad.flatten() for p in part.parameters()]) for part in (net.extrinsic, net.intrinsic)]

    plain = gradients()
    paid, rewarded = gradients(reward=batch.rows["reward"] + 1), gradients(bonus=batch.rows["bonus"] + 1)
    assert not torch.allclose(paid[0], plain[0]) and torch.equal(paid[1], plain[1])
    assert torch.equal(rewarded[0], plain[0]) and not torch.allclose(rewarded[1], plain[1])


def test_without_an_arm_it_plays_the_one_that_an_evaluator_chose():
    cfg = config(memory="none")
    agent = build(cfg, SPEC)
    net, memory = agent.network(), agent.recurrent_state.initial(2, torch.device("cpu"))
    obs = {"obs": torch.randn(2, 3)}
    net.arm.fill_(3)
    decision = agent.act(net, obs, memory, ExplorationParams(torch.zeros(2)), torch.Generator())
    assert decision.extras["arm"].tolist() == [3, 3]
    chosen = agent.act(
        net, obs, memory, ExplorationParams(torch.zeros(2), index=torch.tensor([1, 4])), torch.Generator()
    )
    assert chosen.extras["arm"].tolist() == [1, 4]
