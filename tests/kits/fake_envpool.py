"""Stand-ins for EnvPool, which is not installed: CartPoles behind the interface of `envpool.make_gymnasium`.

As in EnvPool, `observation_space` and `action_space` are those of one environment, the seed belongs to the constructor,
`spec` is no Gymnasium spec, and an environment is reset in the step after its episode has ended.
"""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import gymnasium
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.vector import AutoresetMode, VectorEnv

ATARI_LIKE = gymnasium.spaces.Box(0, 255, (1, 24, 24), np.uint8)


class Pool:
    """The part that all versions have. `image` observes pictures and lives, as Atari does."""

    def __init__(self, num_envs=1, batch_size=0, seed=42, image=False, render_mode=None, max_steps=30):
        self.config = {"num_envs": num_envs, "batch_size": batch_size or num_envs, "seed": seed}
        self.spec = SimpleNamespace(config=self.config)
        self._envs = [CartPoleEnv(render_mode=render_mode) for _ in range(num_envs)]
        self._image, self._render_mode, self._max_steps = image, render_mode, max_steps
        self._seeds = [seed + index for index in range(num_envs)]
        self._done, self._steps = np.ones(num_envs, bool), np.zeros(num_envs, np.int32)
        self._answer, self.closed = None, False

    @property
    def observation_space(self):
        return ATARI_LIKE if self._image else self._envs[0].observation_space

    @property
    def action_space(self):
        return self._envs[0].action_space

    @property
    def all_env_ids(self):
        return np.arange(len(self._envs), dtype=np.int32)

    def send(self, action, env_id=None):
        assert self._answer is None, "send without recv"
        action = action.astype(np.int32, order="C")
        if action.shape != (len(self._envs),):
            raise RuntimeError(f"Expected shape ('num_env',) with action \"action\", got {action.shape}")
        self._answer = self._rows([self._step(i, int(action[i])) for i in range(len(self._envs))])

    def recv(self, reset=False, return_info=True):
        answer, self._answer = self._answer, None
        obs, reward, done, trunc, info = answer
        return (obs, info) if reset else (obs, reward, done & ~trunc, trunc, info)

    def step(self, action, env_id=None):
        self.send(action, env_id)
        return self.recv()

    def _reset_all(self):
        assert self._answer is None, "reset with a step in flight"
        self._answer = self._rows([self._begin(i) for i in range(len(self._envs))])
        return self.recv(reset=True)

    def _begin(self, i):
        seed, self._seeds[i] = self._seeds[i], None
        self._done[i], self._steps[i] = False, 0
        return self._envs[i].reset(seed=seed)[0], 0.0, False, False

    def _step(self, i, action):
        if self._done[i]:
            return self._begin(i)
        obs, reward, done, _, _ = self._envs[i].step(action)
        self._steps[i] += 1
        trunc = bool(self._steps[i] >= self._max_steps)
        self._done[i] = done or trunc
        return obs, reward, self._done[i], trunc

    def _rows(self, rows):
        obs, reward, done, trunc = zip(*rows, strict=True)
        obs = np.stack(obs).astype(np.float32)
        if self._image:
            obs = (np.abs(obs).sum(1) * 50).astype(np.uint8)[:, None, None, None] * np.ones((1, 1, 24, 24), np.uint8)
        info = {"env_id": self.all_env_ids, "elapsed_step": self._steps.copy(),
                "players": {"env_id": self.all_env_ids}, "lives": (3 - self._steps // 10).astype(np.int32)}
        return obs, np.array(reward, np.float32), np.array(done), np.array(trunc), info

    def render(self, env_ids=None, camera_id=None):
        if self._render_mode is None:
            raise RuntimeError("render_mode must be set to 'rgb_array' or 'human' when creating this env")
        return np.stack([self._envs[0].render()])

    def __deepcopy__(self, memo):
        raise TypeError("cannot pickle 'Pool' object")


class OldPool(Pool, gymnasium.Env):
    """Of EnvPool before 1.2: a `gymnasium.Env` whose `reset` takes no seed."""

    def reset(self, env_id=None):
        return self._reset_all()

    def close(self):
        self.closed = True


class NewPool(Pool, VectorEnv):
    """Of EnvPool 1.2: a `VectorEnv`, whose `reset` warns about seeds."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012 (gymnasium's own convention)

    num_envs = property(lambda self: self.config["num_envs"])
    single_observation_space = property(lambda self: self.observation_space)
    single_action_space = property(lambda self: self.action_space)

    def reset(self, env_id=None, *, seed=None, options=None):
        if seed is not None:
            warnings.warn("EnvPool seeds are fixed when the environment is created.", stacklevel=2)
        return self._reset_all()

    def close(self, **kwargs):
        self.closed = True
