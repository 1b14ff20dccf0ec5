"""Wiring: every switch of DQN learns the known optimum of a chain from uniformly random behaviour.

Exploration cannot fail here, so a failure means that something is connected wrongly, not bad luck.
"""

from itertools import combinations

import gymnasium
import numpy as np
import pytest
import torch
from chain_rows import (
    COMMON,
    FAMILY,
    GAMMA,
    LENGTH,
    ROWS,
    SWITCHES,
    assert_solved,
    expected,
    name_of,
    overrides_of,
    values_of,
    words_of,
)
from gymnasium import spaces
from real_runs import train

from qfleet import api
from qfleet.envs.toy import Chain

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_all_settings_of_every_pair_occur():
    for one, two in combinations(SWITCHES, 2):
        assert {(row[one], row[two]) for row in ROWS} == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_the_oracle_agrees_with_the_optimum_where_both_apply():
    np.testing.assert_allclose(expected(1, False), Chain.optimal_q(LENGTH, GAMMA), atol=1e-5)
    np.testing.assert_allclose(expected(1, True), Chain.optimal_q(LENGTH, GAMMA), atol=1e-3)
    assert (expected(3, False) < Chain.optimal_q(LENGTH, GAMMA) - 0.01).any()


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_the_greedy_policy_is_optimal(tmp_path, monkeypatch, row):
    monkeypatch.chdir(tmp_path)
    result = train("toy/Chain-v0", *COMMON, *overrides_of(row))
    assert result.best == 1
    assert_solved(result.directory, row)


@pytest.mark.parametrize("member", FAMILY)
def test_members_of_the_value_family_learn_the_same_values(tmp_path, monkeypatch, member):
    monkeypatch.chdir(tmp_path)
    result = train("toy/Chain-v0", *words_of(member))
    assert result.best == 1
    np.testing.assert_allclose(values_of(result.directory), Chain.optimal_q(LENGTH, GAMMA), atol=0.1)


def test_another_discount_learns_other_values(tmp_path, monkeypatch):
    """The comparison can fail, and does not depend on one γ."""
    monkeypatch.chdir(tmp_path)
    q = values_of(train("toy/Chain-v0", *COMMON, "agent.gamma=0.5").directory)
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
