"""Values of actions: those that the next greedy action compares, in units of the return, without an effect."""

import numpy as np
import pytest
import torch

from qfleet.actor.policy import Policy
from qfleet.core.agent import ExplorationParams
from qfleet.maths.value_rescaling import h_inverse
from qfleet.runconfig.build import make_agent, make_env
from qfleet.runconfig.resolution import resolve

SEQUENCE = ["agent.hidden=[8]", "agent.features=[8]", "agent.units=8", "agent.burn_in=2", "agent.unroll=4",
            "agent.stride=2"]
CURIOUS = [*SEQUENCE, "agent.arms=4", "agent.embedding=4", "agent.curious_hidden=[8]", "agent.episodic_capacity=64",
           "explore.kind=bandit", "explore.arms=4"]
AGENTS = {
    "dqn": ["cartpole"], "dueling": ["cartpole", "agent.dueling=true", "agent.rescale=true"],
    "noisy": ["cartpole", "agent.noisy=true", "explore.kind=constant", "explore.epsilon=0"],
    "c51": ["cartpole", "agent.algo=c51"], "qr": ["cartpole", "agent.algo=qr"], "iqn": ["cartpole", "agent.algo=iqn"],
    "r2d2": ["hidden-cartpole", "agent.rescale=true", *SEQUENCE],
    "ngu": ["hidden-cartpole", "agent.algo=ngu", *CURIOUS],
    "agent57": ["hidden-cartpole", "agent.algo=agent57", *CURIOUS]}
GREEDY = ExplorationParams(torch.zeros(5), network_noise=False)


def policy_of(words):
    name, *overrides = words
    config = resolve(name, [*overrides, *(["agent.hidden=[8]"] if name == "cartpole" else [])]).config
    env = make_env(config.env, 1)
    spec = env.spec
    env.close()
    return Policy(make_agent(config, spec), 3, torch.device("cpu")), spec


def observations(spec, seed):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=(5, *leaf.shape)).astype(leaf.dtype) for name, leaf in spec.observation.items()}


@pytest.mark.parametrize("name", AGENTS)
def test_the_greedy_action_has_the_largest_value(name):
    policy, spec = policy_of(AGENTS[name])
    for seed in range(4):  # the recurrent state of recurrent agents moves on
        obs = observations(spec, seed)
        values = policy.q_values(obs)
        assert values.shape == (5, spec.num_actions) and values.dtype == np.float32
        assert np.array_equal(policy.q_values(obs), values), "looking changes nothing"
        assert values.argmax(1).tolist() == policy.act(obs, GREEDY)[0].tolist()


def test_looking_has_no_effect_on_acting():
    seen = []
    for looks in (False, True):
        policy, spec = policy_of(AGENTS["iqn"])
        actions = []
        for seed in range(5):
            obs = observations(spec, seed)
            if looks:
                policy.q_values(obs)
            actions.append(policy.act(obs, ExplorationParams(torch.full((5,), 0.5)))[0].tolist())
        seen.append((actions, policy.rng.get_state().tolist()))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("name", ["dueling", "r2d2"])
def test_values_are_in_units_of_the_return(name):
    policy, spec = policy_of(AGENTS[name])
    obs = observations(spec, 0)
    values, extras = policy.q_values(obs), policy.act(obs, GREEDY)[1]
    learned = torch.from_numpy(extras["distribution" if name == "dueling" else "q"])
    assert np.allclose(values, h_inverse(learned).numpy()) and not np.allclose(values, learned.numpy())


def test_continuous_actions_have_no_values():
    policy, spec = policy_of(["pendulum", "agent.hidden=[8]"])
    assert policy.q_values(observations(spec, 0)) is None
