"""`check` says what an agent would meet, and names what is wrong."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from qfleet.envs import EnvConfig
from qfleet.envs.check import check


def texts(level, **cfg):
    return "\n".join(finding.text for finding in check(EnvConfig(**cfg)) if finding.level == level)


def test_a_sound_environment():
    assert not texts("error", id="CartPole-v1") and not texts("warning", id="CartPole-v1")
    info = texts("info", id="CartPole-v1")
    for words in ("vector float32 (4,)", "2 actions", "steps/s", "rewards 1 to 1"):
        assert words in info


def test_a_sound_environment_with_continuous_actions():
    assert not texts("error", id="Pendulum-v1") and not texts("warning", id="Pendulum-v1")
    info = texts("info", id="Pendulum-v1")
    for words in ("actions of 1 numbers within -2 to 2", "rewards -1"):
        assert words in info


def test_images_and_categories_are_described():
    assert "image uint8 (3, 84, 84), 3 frames" in texts("info", id="toy/Catch-v0", kwargs={"pixels": True}, stack=3)
    assert "32 categories" in texts("info", id="Blackjack-v1")


def test_atari_tells_its_protocol():
    pytest.importorskip("ale_py")
    info = texts("info", id="BreakoutNoFrameskip-v4")
    assert "protocol classic" in info and "life loss ends" in info and "image uint8 (4, 84, 84)" in info


@pytest.mark.parametrize("cfg, words", [
    ({"id": "Nothing-v0"}, "no environment"), ({"id": f"{__name__}:Free", "kwargs": {"rule": "none"}}, "has no bounds"),
    ({"id": "toy/Faulty-v0", "kwargs": {"nan_at": 5}}, "NaN"),
    ({"id": "toy/Faulty-v0", "kwargs": {"shape_at": 5}}, "(5,)"),
    ({"id": "toy/Faulty-v0", "kwargs": {"raise_at": 0}}, "set to fail"),
])
def test_errors(cfg, words):
    assert words in texts("error", **cfg)


def test_warnings():
    assert "10,000 steps" in texts("warning", id="toy/Faulty-v0", kwargs={"length": 0})
    assert "no time limit" not in texts("warning", id="toy/Faulty-v0"), "its episodes end by themselves"
    assert "no time limit" not in texts("warning", id="toy/Faulty-v0", kwargs={"length": 0}, max_episode_steps=900)
    assert "no reward" in texts("warning", id="MountainCar-v0", clip_rewards=False, wrappers=[f"{__name__}:Silent"])
    assert "rebuilt" in texts("warning", id="toy/Faulty-v0", kwargs={"raise_at": 60, "length": 5})


class Silent(gymnasium.RewardWrapper):
    def reward(self, reward):
        return 0.0


class Odd(gymnasium.Env):
    """Breaks one rule of the interface, as told."""

    observation_space = spaces.Box(0, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, rule):
        self.rule, self.drift = rule, 0.0

    def reset(self, *, seed=None, options=None):
        self.drift += 0.01 if self.rule == "seed" else 0
        obs = np.full(2, self.drift, np.float32)
        return obs if self.rule == "reset" else (obs, {})

    def step(self, action):
        obs = np.zeros(2, np.float64 if self.rule == "dtype" else np.float32)
        reward = {"scale": 1e4, "reward": np.ones(1)}.get(self.rule, 1.0)
        if self.rule == "four":
            return obs, reward, False, {}
        return obs, reward, 0 if self.rule == "flag" else False, False, {}


@pytest.mark.parametrize("rule, level, words", [
    ("reset", "error", "reset must return"), ("four", "error", "a tuple of 4"),
    ("flag", "warning", "terminated is a int"),
    ("dtype", "warning", "not in its space: float64"), ("seed", "warning", "two rollouts with the same seed differ"),
    ("scale", "warning", "rewards reach 10000"), ("reward", "error", "as one number, not a ndarray of shape (1,)"),
])
def test_broken_rules_are_named(rule, level, words):
    assert words in texts(level, id=f"{__name__}:Odd", kwargs={"rule": rule}, max_episode_steps=50)


@pytest.mark.parametrize("rule, words", [("reset", "old Gym"), ("four", "old Gym"), ("reward", "return a float")])
def test_what_is_wrong_is_said_once(rule, words):
    found = texts("error", id=f"{__name__}:Odd", kwargs={"rule": rule}, max_episode_steps=50)
    assert len(found.splitlines()) == 1 and words in found


class Free(Odd):
    """Takes any push, however hard."""

    action_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
