"""The priority that an actor gives its fresh windows is the one that a learner with the same network would give."""

import numpy as np
import pytest
import torch
from family_kit import ALGOS, SMALL

from qfleet.actor.actor import Actor, Recorder
from qfleet.actor.policy import Policy
from qfleet.algos import iqn
from qfleet.envs import EnvConfig, make
from qfleet.explore.constant import Constant
from qfleet.replay.config import ReplayConfig
from qfleet.replay.host_store import HostReplay
from qfleet.replay.layout import Layout
from qfleet.training.evaluation import EpisodeCounter

MEMBERS = {**SMALL, "iqn": {"samples": 6, "target_samples": 6, "policy_samples": 6}}


class Listening(HostReplay):
    """Remembers with which priorities chunks arrived."""

    def __init__(self, *args):
        super().__init__(*args)
        self.heard = []

    def add(self, chunk, priority=None):
        self.heard.append(priority)
        return super().add(chunk, priority)


def played(env_id, switches, prioritised=True, lanes=3, steps=160, algo="dqn"):
    env = make(EnvConfig(id=env_id, lanes=lanes), lanes)
    agent = ALGOS[algo].build(ALGOS[algo].Config(hidden=(16,), **MEMBERS[algo], **switches), env.spec)
    layout = Layout(env.spec, agent.window, 16, agent.columns)
    cfg = ReplayConfig(capacity=2_000, min_steps=0, samples_per_insert=100, chunk_steps=16, alpha=1.0)
    replay = Listening(layout, cfg, 0, torch.device("cpu"))
    policy = Policy(agent, 0, torch.device("cpu"))
    actor = Actor(policy, env, Constant(0.5, lanes), EpisodeCounter(0, lanes), None,
                  Recorder(agent, layout, lanes, replay, prioritised), replay.clock)
    actor.begin(range(lanes))
    for _ in range(steps):
        assert actor.step()
    env.close()
    return agent, policy, replay


@pytest.fixture
def even_levels(monkeypatch):
    """IQN samples its levels, an actor others than a learner: with evenly spread ones both see the same."""
    monkeypatch.setattr(iqn, "sample_taus", lambda items, n, rng: ((torch.arange(n) + 0.5) / n).expand(items, n))


@pytest.mark.parametrize("env_id", ["CartPole-v1", "toy/Catch-v0"])
@pytest.mark.parametrize("switches", [{}, {"n_step": 3}, {"n_step": 5, "rescale": True, "double": False},
                                      {"dueling": True, "n_step": 2}, {"munchausen": True, "n_step": 2},
                                      {"noisy": True, "noisy_sigma": 1e-12}])
@pytest.mark.parametrize("algo", ALGOS)
@pytest.mark.usefixtures("even_levels")
def test_actor_and_learner_agree(env_id, switches, algo):
    """Noise of size 0: an actor's is never the learner's."""
    agent, policy, replay = played(env_id, switches, algo=algo)
    sample = replay.sample(128)
    net = policy.flat.net
    wanted = agent.loss(net, net, sample, policy.rng).priority
    given = replay._priorities.tree.get(sample.keys)  # alpha = 1, nothing evicted: the leaf is the priority
    np.testing.assert_allclose(given, np.maximum(wanted.detach().numpy(), 1e-6), rtol=2e-4, atol=2e-5)
    assert np.ptp(given) > 0


def test_without_priorities_nothing_is_computed_and_hints_are_never_stored():
    _, _, replay = played("CartPole-v1", {}, prioritised=False)
    assert replay.heard and all(priority is None for priority in replay.heard)
    assert "q" not in replay.sample(8).rows
    assert "q" not in played("CartPole-v1", {})[2].sample(8).rows
