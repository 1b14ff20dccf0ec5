"""Environments for tests of vector environments, by name: an actor or a worker process can import them."""

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

PARTS = {"camera": spaces.Box(0, 255, (12, 10, 3), np.uint8), "speed": spaces.Box(-1, 1, (2,), np.float32),
         "gear": spaces.Discrete(4, start=1)}


class Walk(gymnasium.Env):
    """Episodes of random length with random rewards; `info` has a success, a cost, and sometimes a bonus."""

    def __init__(self, observation=PARTS["speed"], action=None, shift=0.0):
        self.observation_space = observation
        self.action_space = spaces.Discrete(3, start=-1) if action is None else action
        self.shift = shift

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(2, 9))
        return self._observe(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.left -= 1
        reward = float(self.np_random.normal()) + float(np.sum(action)) + self.shift
        info = {"success": self.left == 0 and reward > 0, "cost": reward ** 2, "stats": {"left": self.left}}
        if self.left % 2:
            info["bonus"] = reward
        ends = self.left <= 0
        return self._observe(), reward, ends and reward > 0, ends and reward <= 0, info

    def _observe(self):
        self.observation_space.seed(int(self.np_random.integers(1 << 30)))
        return self.observation_space.sample()


class DictWalk(Walk):
    def __init__(self):
        super().__init__(spaces.Dict(PARTS))


class PairWalk(Walk):
    def __init__(self):
        super().__init__(spaces.Tuple([spaces.MultiBinary(3), spaces.MultiDiscrete([2, 3])]),
                         spaces.MultiDiscrete([2, 3]))


class GearWalk(Walk):
    def __init__(self):
        super().__init__(PARTS["gear"])


class ContinuousWalk(Walk):
    def __init__(self):
        super().__init__(action=spaces.Box(np.array([-2, 0], np.float32), np.array([1, 5], np.float32)))


class Doubled(gymnasium.vector.VectorWrapper):
    """A wrapper that changes rewards: stepping the environment below it in two halves would miss that."""

    def step(self, actions):
        obs, reward, terminated, truncated, info = self.env.step(actions)
        return obs, 2 * reward, terminated, truncated, info


class Silent(VectorEnv):
    """A vector environment that does not say when it resets."""

    def __init__(self, num_envs):
        self.env = SyncVectorEnv([Walk] * num_envs)
        self.num_envs, self.metadata, self.seeds = num_envs, {}, []
        for name in ("single_observation_space", "single_action_space", "observation_space", "action_space"):
            setattr(self, name, getattr(self.env, name))

    def reset(self, *, seed=None, options=None):
        self.seeds.append(seed)
        return self.env.reset(seed=seed)

    def step(self, actions):
        return self.env.step(actions)


def sync(num_envs):
    return SyncVectorEnv([Walk] * num_envs)


def four():
    return SyncVectorEnv([Walk] * 4)


def asynchronous(num_envs):
    return AsyncVectorEnv([Walk] * num_envs)


def doubled(num_envs):
    return Doubled(asynchronous(num_envs))


def same_step(num_envs):
    return SyncVectorEnv([Walk] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


def cartpoles(num_envs):
    return SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * num_envs)


class Failing(Walk):
    def step(self, action):
        if self.left == 1:
            raise RuntimeError("the gripper is stuck")
        return super().step(action)


class Broken(Walk):
    """Returns what must not be returned, by name."""

    def __init__(self, what):
        super().__init__()
        self.what = what

    def step(self, action):
        obs, reward, *rest = super().step(action)
        if self.what == "obs":
            obs = np.full(2, np.nan, np.float32)
        return obs, np.inf if self.what == "reward" else reward, *rest
