"""Wiring: every switch of DQN learns the known optimum of a chain from uniformly random behaviour.

Exploration cannot fail here, so a failure means that something is connected wrongly, not bad luck. The switches are
combined so that all four settings of every pair of them occur: six rows are enough for up to ten switches (Kleitman and
Spencer 1973: one row of zeros, and a different 3-subset of the other five for each switch).
"""

from itertools import combinations, product

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from real_runs import train

from qfleet import api
from qfleet.envs.toy import Chain
from qfleet.maths.rescale import h, h_inverse

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

LENGTH, GAMMA = 6, 0.9
SWITCHES = {
    "double": ("agent.double=false", "agent.double=true"),
    "dueling": ("agent.dueling=false", "agent.dueling=true"),
    "n_step": ("agent.n_step=1", "agent.n_step=3 learner.learning_rate=1e-3 total_steps=12000"),  # noisier targets
    "priority": ("replay.alpha=0", "replay.alpha=0.6 replay.beta_start=1 replay.beta_end=1"),
    "rescale": ("agent.rescale=false", "agent.rescale=true"),
    "loss": ("agent.loss=mse", "agent.loss=huber"),
    "target": ("learner.target_period_updates=50", "learner.target_period_updates=0 learner.target_tau=0.05"),
    "optimizer": ("learner.optimizer=adam", "learner.optimizer=rmsprop learner.learning_rate=5e-4"),
    "norm": ("agent.norm=none", "agent.norm=layer"),
}
SUBSETS = list(combinations(range(1, 6), 3))
ROWS = [{switch: int(row in subset) for switch, subset in zip(SWITCHES, SUBSETS, strict=False)} for row in range(6)]
COMMON = ["env.lanes=8", f"env.kwargs={{length: {LENGTH}}}", f"agent.gamma={GAMMA}", "agent.hidden=[32]",
          "explore.kind=constant", "explore.epsilon=1", "learner.learning_rate=5e-3", "learner.batch_size=32",
          "replay.samples_per_insert=8", "replay.capacity=2000", "eval.period_steps=null", "eval.episodes=1",
          "env.max_episode_steps=100", "total_steps=5000", "run.log_period_steps=1000"]


def test_all_settings_of_every_pair_occur():
    for one, two in combinations(SWITCHES, 2):
        assert {(row[one], row[two]) for row in ROWS} == {(0, 0), (0, 1), (1, 0), (1, 1)}


def expected(n_step, rescale):
    """What the values must become: a step taken, n - 1 random ones after it, and the best value from there."""
    learnt = np.zeros((LENGTH - 1, 2))
    forward, back = (h, h_inverse) if rescale else (lambda x: x, lambda x: x)
    for _ in range(200):
        best = back(torch.tensor(learnt.max(1)))
        learnt = np.array([[np.mean([float(forward(outcome(state, [action, *random], best)))
                                     for random in product((0, 1), repeat=n_step - 1)])
                            for action in (0, 1)] for state in range(LENGTH - 1)])
    return back(torch.tensor(learnt)).numpy()


def outcome(state, actions, best):
    """The discounted reward of some actions in a row, with the value of where they lead."""
    for taken, action in enumerate(actions):
        state = max(state + 2 * action - 1, 0)
        if state == LENGTH - 1:
            return torch.tensor(GAMMA**taken)
    return GAMMA ** len(actions) * best[state]


def test_the_oracle_agrees_with_the_optimum_where_both_apply():
    np.testing.assert_allclose(expected(1, False), Chain.optimal_q(LENGTH, GAMMA), atol=1e-5)
    np.testing.assert_allclose(expected(1, True), Chain.optimal_q(LENGTH, GAMMA), atol=1e-3)
    assert (expected(3, False) < Chain.optimal_q(LENGTH, GAMMA) - 0.01).any()


def learnt(tmp_path, monkeypatch, *overrides):
    """The network's values [states, actions] of the states that can be left, and the best policy's return."""
    monkeypatch.chdir(tmp_path)
    result = train("toy/Chain-v0", *COMMON, *overrides)
    agent = api.load(result.directory, which="latest")
    with torch.inference_mode():
        q = agent.policy.flat.net({"obs": torch.eye(LENGTH)[:-1]})
    return h_inverse(q).numpy() if agent.config.agent.rescale else q.numpy(), result.best


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(switch for switch, on in row.items() if on) or "plain")
def test_the_greedy_policy_is_optimal(tmp_path, monkeypatch, row):
    chosen = [word for switch, on in row.items() for word in SWITCHES[switch][on].split()]
    q, best = learnt(tmp_path, monkeypatch, *chosen)
    assert best == 1 and (q.argmax(1) == 1).all(), q
    values = expected(3 if row["n_step"] else 1, row["rescale"])
    np.testing.assert_allclose(q, values, atol=0.08)


def test_another_discount_learns_other_values(tmp_path, monkeypatch):
    """The comparison can fail, and does not depend on one γ."""
    q, _ = learnt(tmp_path, monkeypatch, "agent.gamma=0.5")
    assert np.abs(q - Chain.optimal_q(LENGTH, GAMMA)).max() > 0.3
    assert np.abs(q - Chain.optimal_q(LENGTH, 0.5)).max() < 0.05


class Lottery(gymnasium.Env):
    """One decision: action 0 pays 0.15 for certain, action 1 pays 1 with probability 0.1 and otherwise nothing."""

    observation_space = spaces.Box(0, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.ones(1, np.float32), {}

    def step(self, action):
        reward = float(self.np_random.random() < 0.1) if action else 0.15
        return np.ones(1, np.float32), reward, True, False, {}


@pytest.mark.parametrize("beta", [1, 0])
def test_importance_weights_undo_the_preference_for_surprises(tmp_path, monkeypatch, beta):
    """Surprises drawn more often make the lottery look worth 0.2: 0.1 (1-q)^1.6 = 0.9 q^1.6; weights mend that."""
    monkeypatch.chdir(tmp_path)
    weights = f"replay.alpha=0.6 replay.beta_start={beta} replay.beta_end={beta} replay.capacity=10000".split()
    result = train("test_wiring:Lottery", *COMMON[2:], *weights, "learner.learning_rate=3e-4", "total_steps=12000")
    agent = api.load(result.directory, which="latest")
    with torch.inference_mode():
        certain, lottery = agent.policy.flat.net({"obs": torch.ones(1, 1)})[0].tolist()
    assert certain == pytest.approx(0.15, abs=0.03)
    assert lottery == pytest.approx(0.1, abs=0.03) if beta else lottery > 0.16
