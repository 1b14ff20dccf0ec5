"""Runs with running normalisation: their statistics, resumed and exported; and a task that is not learnt without it."""

import shutil
from typing import ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from real_runs import newest, train, weights_hash

from qfleet import api
from qfleet.core.agent import ROW_MOMENTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
BOTH = ["normalise.observations=true", "normalise.rewards=true"]
SEQUENCES = ["agent.algo=r2d2", "agent.units=8", "agent.features=[8]", "agent.burn_in=3", "agent.unroll=4",
             "agent.stride=2", "agent.n_step=2"]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


class Signs(gymnasium.Env):
    """The action has to be the sign that is hidden in a large offset, beside a value that is a million times as large.

    An episode has 10 steps, and each right action gives `gain`; random actions get half of the best return.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(2)
    made: ClassVar[list] = []

    def __init__(self, gain=1.0):
        self.gain, self.rows, self.rewards = gain, [], []
        Signs.made.append(self)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._observe(), {}

    def step(self, action):
        self.rows.append((self.t, self.seen))
        self.rewards.append(self.gain * (action == self.sign))
        self.t += 1
        return self._observe(), self.rewards[-1], False, self.t == 10, {}

    def _observe(self):
        self.sign = int(self.np_random.integers(2))
        self.seen = np.array([100 + 0.1 * self.sign, 1e5 * self.np_random.normal()], np.float32)
        return self.seen


SMALL = ["agent.hidden=[16]", "env.lanes=1", "replay.min_steps=100", "eval.period_steps=null", "stop_at=null"]


def statistics(run):
    weights = newest(run).policy()
    return [weights[name].numpy() for name in ROW_MOMENTS]


@pytest.mark.parametrize("words", [["agent.algo=dqn", "agent.n_step=3"], SEQUENCES], ids=["steps", "sequences"])
def test_statistics_are_those_of_every_step_taken_once(words):
    """Windows overlap and contain padding; a naive loop over the environment's own record does not."""
    Signs.made.clear()
    run = train(Signs, *words, *SMALL, *BOTH, "agent.gamma=0.9", "total_steps=505", "env.kwargs.gain=3").directory
    env = max(Signs.made, key=lambda env: len(env.rows))
    count, mean, square = statistics(run)
    n, g, returns = int(count), 0.0, []
    for (t, _), reward in zip(env.rows, env.rewards, strict=True):
        g = reward + (0.9 * g if t else 0.0)
        returns.append(g)
    values = np.array([[*seen, g] for (_, seen), g in zip(env.rows, returns, strict=True)], np.float64)[:n]
    assert len(env.rows) - 24 <= n <= len(env.rows)
    np.testing.assert_allclose(mean, values.mean(0), rtol=1e-6)
    np.testing.assert_allclose(square / n, values.var(0), rtol=1e-4)


@pytest.mark.parametrize("words", [["cartpole", "replay.alpha=0.6"], ["hidden-cartpole", *SEQUENCES[1:]], ["pendulum"]])
def test_resumed_equals_never_interrupted(words):
    exact = [*words, *BOTH, "run.exact_resume=true", "checkpoint.period_steps=400", "env.max_episode_steps=50",
             "total_steps=1000", "checkpoint.keep=9", "eval.period_steps=300"]
    whole = train(*exact, "run.name=whole").directory
    broken = whole.with_name("broken")
    shutil.copytree(whole, broken)
    for each in sorted((broken / "checkpoints").glob("step-*"))[1:]:
        shutil.rmtree(each)
    assert weights_hash(broken) != weights_hash(whole)
    api.resume(broken)
    assert weights_hash(broken) == weights_hash(whole)
    assert all(np.array_equal(a, b) for a, b in zip(statistics(whole), statistics(broken), strict=True))


def test_only_with_normalisation_is_a_badly_scaled_task_learnt():
    def score(*words):
        run = train(Signs, "agent.algo=dqn", *SMALL, "total_steps=1500", "learner.learning_rate=3e-3", *words,
                    "agent.gamma=0.5", "learner.batch_size=32", "learner.target_period_updates=50",
                    "env.kwargs.gain=1000").directory
        agent, env, total = api.load(run, which="latest"), Signs(), 0.0
        for seed in range(20):
            obs, over = env.reset(seed=seed)[0], False
            while not over:
                obs, reward, _, over, _ = env.step(agent.act(obs))
                total += reward
        return total / 20

    without, observations, both = score(), score(BOTH[0]), score(*BOTH)
    print(without, observations, both)
    assert both > 9.5 > 7 > without
