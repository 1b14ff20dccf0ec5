"""Small environments with known optimal returns, for tests and tutorials: `toy/...` ids.

    Catch       catch the falling ball; best return 1, a random paddle about -0.6
    DeepSea     always go right; best return 0.99, a random walk finds it once in 2^size episodes
    MemoryCue   repeat the cue of the first observation; best return 1, without memory 0 on average
    TMaze       walk to a junction, turn as the first observation said; best return 1, without memory 0.5 on average
    HiddenCartPole  CartPole without its velocities; best return 500
    Chain       walk to the right end; best return 1, the optimal values are `Chain.optimal_q`
    LQR         stabilise a mass on a spring, continuous actions; the best return is `LQR.optimal_return`
    Faulty      fails at given steps; best return is the length of its episodes
"""

from __future__ import annotations

import os
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.classic_control import CartPoleEnv

from qfleet.core.env import VectorEnv
from qfleet.envs import EnvConfig, gym

GymStep = tuple[np.ndarray, float, bool, bool, dict[str, Any]]
LONGEST_STEPS = 10_000


def claims(id: str) -> bool:
    return id.startswith("toy/")


def inactive(cfg: EnvConfig) -> dict[str, str]:
    return gym.inactive(cfg)


def make(cfg: EnvConfig, lanes: int, render: bool) -> VectorEnv:
    register()
    return gym.make(cfg, lanes, render)


def register() -> None:
    """Register the toy environments with Gymnasium."""
    for toy in (Catch, DeepSea, MemoryCue, TMaze, Chain, LQR):
        _register(toy, LONGEST_STEPS)
    _register(HiddenCartPole, 500)
    _register(Faulty, None)


def _register(toy: type[gymnasium.Env[Any, Any]], limit: int | None) -> None:
    id = f"toy/{toy.__name__}-v0"
    if id not in gymnasium.registry:
        gymnasium.register(id, entry_point=f"{__name__}:{toy.__name__}", max_episode_steps=limit)


class Catch(gymnasium.Env[np.ndarray, Any]):
    """A ball falls straight down a board; the paddle on the bottom row moves left, stays or moves right.

    Observes the board, float32 [rows, columns], or with `pixels` an image, uint8 [side, side].
    The reward is +1 for a catch and -1 for a miss, at the end; an episode takes rows - 1 steps.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 5}  # noqa: RUF012 (gymnasium's own convention)

    def __init__(
        self, rows: int = 10, columns: int = 5, pixels: bool = False, side: int = 84, render_mode: str | None = None
    ) -> None:
        self.rows, self.columns, self.pixels, self.side, self.render_mode = rows, columns, pixels, side, render_mode
        self.action_space = spaces.Discrete(3)
        self.observation_space = (spaces.Box(0, 255, (side, side), np.uint8) if pixels
                                  else spaces.Box(0, 1, (rows, columns), np.float32))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, Any]:
        super().reset(seed=seed)
        self.row, self.ball, self.paddle = 0, int(self.np_random.integers(self.columns)), self.columns // 2
        return self._observe(), {}

    def step(self, action: int) -> GymStep:
        self.row += 1
        self.paddle = min(max(self.paddle + action - 1, 0), self.columns - 1)
        over = self.row == self.rows - 1
        reward = (1.0 if self.ball == self.paddle else -1.0) if over else 0.0
        return self._observe(), reward, over, False, {}

    def render(self) -> np.ndarray:
        return np.repeat(self._image(84)[:, :, None], 3, 2)

    def _observe(self) -> np.ndarray:
        return self._image(self.side) if self.pixels else self._board()

    def _board(self) -> np.ndarray:
        board = np.zeros((self.rows, self.columns), np.float32)
        board[self.row, self.ball] = board[-1, self.paddle] = 1
        return board

    def _image(self, side: int) -> np.ndarray:
        row, column = np.arange(side) * self.rows // side, np.arange(side) * self.columns // side
        return (self._board()[row][:, column] * 255).astype(np.uint8)


class DeepSea(gymnasium.Env[np.ndarray, Any]):
    """A diver sinks one row per step and moves left or right (Osband et al. 2019); the treasure is in the right corner.

    Observes its cell one-hot, float32 [size, size]. Every move right costs 0.01 / size, the treasure gives 1: only
    `size` moves right in a row pay off. With `mapping_seed` the meaning of the two actions differs from cell to cell.
    """

    def __init__(self, size: int = 10, mapping_seed: int | None = None) -> None:
        self.size = size
        self.action_space = spaces.Discrete(2)
        self.observation_space = spaces.Box(0, 1, (size, size), np.float32)
        shape = (size, size)
        self.right = (np.ones(shape, int) if mapping_seed is None
                      else np.random.default_rng(mapping_seed).integers(2, size=shape))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, Any]:
        super().reset(seed=seed)
        self.row = self.column = 0
        return self._observe(), {}

    def step(self, action: int) -> GymStep:
        right = action == self.right[self.row, self.column]
        found = right and self.row == self.column == self.size - 1
        reward = float(found) - 0.01 / self.size * right
        self.column = min(max(self.column + (1 if right else -1), 0), self.size - 1)
        self.row += 1
        return self._observe(), reward, self.row == self.size, False, {}

    def _observe(self) -> np.ndarray:
        cell = np.zeros((self.size, self.size), np.float32)
        if self.row < self.size:
            cell[self.row, self.column] = 1
        return cell


class MemoryCue(gymnasium.Env[np.ndarray, Any]):
    """A cue is shown once; `delay` steps later the same action is required.

    Observes float32 [3]: the cue (-1 or +1, on the first step only), the query (1 on the last step), the fraction of
    time elapsed. The final action gives +1 or -1; earlier actions have no effect.
    """

    def __init__(self, delay: int = 10) -> None:
        self.delay = delay
        self.action_space = spaces.Discrete(2)
        self.observation_space = spaces.Box(-1, 1, (3,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, Any]:
        super().reset(seed=seed)
        self.t, self.cue = 0, int(self.np_random.integers(2))
        return self._observe(), {}

    def step(self, action: int) -> GymStep:
        over = self.t == self.delay
        reward = (1.0 if action == self.cue else -1.0) if over else 0.0
        self.t += 1
        return self._observe(), reward, over, False, {}

    def _observe(self) -> np.ndarray:
        cue = 2 * self.cue - 1 if self.t == 0 else 0
        return np.array([cue, self.t == self.delay, min(self.t / max(self.delay, 1), 1)], np.float32)


class TMaze(gymnasium.Env[np.ndarray, Any]):
    """A corridor of `length` steps that ends in a junction (Bakker 2002); a sign at its start gives the correct turn.

    Observes float32 [3]: the sign (-1 down, +1 up, at the first cell only), the first cell, the junction. Actions:
    forward, up, down. The correct turn gives 1, the wrong one 0; in the corridor up and down have no effect. The
    episode is truncated after four times its length.
    """

    def __init__(self, length: int = 20) -> None:
        self.length = length
        self.action_space = spaces.Discrete(3)
        self.observation_space = spaces.Box(-1, 1, (3,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, Any]:
        super().reset(seed=seed)
        self.t, self.cell, self.up = 0, 0, bool(self.np_random.integers(2))
        return self._observe(), {}

    def step(self, action: int) -> GymStep:
        self.t += 1
        if self.cell == self.length and action > 0:
            return self._observe(), float((action == 1) == self.up), True, False, {}
        self.cell = min(self.cell + int(action == 0), self.length)
        return self._observe(), 0.0, False, self.t == 4 * self.length, {}

    def _observe(self) -> np.ndarray:
        begin = self.cell == 0
        return np.array([(1 if self.up else -1) * begin, begin, self.cell == self.length], np.float32)


class HiddenCartPole(CartPoleEnv):
    """CartPole-v1 that observes the positions of cart and pole, float32 [2], but not their velocities."""

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode=render_mode)
        high = np.array([2 * self.x_threshold, 2 * self.theta_threshold_radians], np.float32)
        self.observation_space = spaces.Box(-high, high, dtype=np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, Any]:
        obs, info = super().reset(seed=seed, options=options)
        return obs[[0, 2]], info

    def step(self, action: Any) -> GymStep:
        obs, reward, over, truncated, info = super().step(action)
        return obs[[0, 2]], float(reward), over, truncated, info


class Chain(gymnasium.Env[np.ndarray, Any]):
    """States in a row: action 1 goes right, action 0 left; the right end gives 1 and ends the episode.

    Observes the state one-hot, float32 [length]. Random behaviour visits every state and action, so that a correct
    Q-learner finds `optimal_q` from random data alone.
    """

    def __init__(self, length: int = 5) -> None:
        self.length = length
        self.action_space = spaces.Discrete(2)
        self.observation_space = spaces.Box(0, 1, (length,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, Any]:
        super().reset(seed=seed)
        self.state = 0
        return self._observe(), {}

    def step(self, action: int) -> GymStep:
        self.state = max(self.state + (1 if action == 1 else -1), 0)
        over = self.state == self.length - 1
        return self._observe(), float(over), over, False, {}

    @staticmethod
    def optimal_q(length: int, gamma: float) -> np.ndarray:
        """Q* of the non-terminal states, [length - 1, 2]: γ to the number of steps before the reward."""
        state = np.arange(length - 1)
        right = length - 2 - state
        left = length - 1 - np.maximum(state - 1, 0)
        return gamma ** np.stack([left, right], 1).astype(float)

    def _observe(self) -> np.ndarray:
        return np.eye(self.length, dtype=np.float32)[self.state]


class LQR(gymnasium.Env[np.ndarray, Any]):
    """A mass on a spring: x' = A x + B u at a cost of |x|² + R u² per step, for `length` steps.

    Observes position and speed, float32 [2], which start within ±1; u is a scalar within ±2. The optimal policy is
    linear, u = −K x, as long as it stays within the bounds, which it does here. The zero policy costs five times as
    much.
    """

    A, B, R = np.array([[0.9, 0.4], [-0.4, 0.9]]), np.array([0.1, 0.4]), 0.3

    def __init__(self, length: int = 20) -> None:
        self.length = length
        self.action_space = spaces.Box(-2, 2, (1,), np.float32)
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, Any]:
        super().reset(seed=seed)
        self.t, self.x = 0, self.np_random.uniform(-1, 1, 2)
        return self._observe(), {}

    def step(self, action: np.ndarray) -> GymStep:
        u = float(action[0])
        cost = float(self.x @ self.x + self.R * u * u)
        self.x, self.t = self.A @ self.x + self.B * u, self.t + 1
        return self._observe(), -cost, False, self.t == self.length, {}

    @classmethod
    def optimal_return(cls, x: np.ndarray, length: int) -> float:
        """−x·P x, the optimal return from x in `length` steps, with P from the backward Riccati recursion."""
        p = np.eye(2)
        for _ in range(length - 1):
            reach = p @ cls.B
            gain = (reach @ cls.A) / (cls.R + cls.B @ reach)
            p = np.eye(2) + cls.A.T @ p @ (cls.A - np.outer(cls.B, gain))
        return -float(x @ p @ x)

    def _observe(self) -> np.ndarray:
        return self.x.astype(np.float32)


class Faulty(gymnasium.Env[np.ndarray, Any]):
    """A random walk, float32 [4], of `length` steps (0 = endless), reward 1 each, with configurable failures.

    `raise_at`, `hang_at`, `exit_at`, `nan_at`, `nan_reward_at`, `shape_at`: step of this instance at which to fail, 1
    being its first step and 0 its first reset. A rebuilt environment is a new instance and counts from 0 again.
    """

    def __init__(self, length: int = 50, hang_s: float = 3600.0, **at: int) -> None:
        kinds = ("raise_at", "hang_at", "exit_at", "nan_at", "nan_reward_at", "shape_at")
        unknown = set(at) - set(kinds)
        if unknown:
            raise TypeError(f"unexpected keyword argument {sorted(unknown)[0]!r}; known: {', '.join(kinds)}")
        self.length, self.hang_s, self.at = length, hang_s, at
        self.action_space = spaces.Discrete(2)
        self.observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.age = self.t = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, Any]:
        super().reset(seed=seed)
        self.t, self.walk = 0, self.np_random.normal(size=4).astype(np.float32)
        return self._observe(), {}

    def step(self, action: int) -> GymStep:
        self.age += 1
        self.t += 1
        self.walk = (self.walk + (2 * action - 1) * 0.1).astype(np.float32)
        reward = float("nan") if self._due("nan_reward_at") else 1.0
        return self._observe(), reward, self.t == self.length, False, {}

    def _observe(self) -> np.ndarray:
        if self._due("raise_at"):
            raise RuntimeError(f"set to fail at step {self.age}")
        if self._due("hang_at"):
            time.sleep(self.hang_s)
        if self._due("exit_at"):
            os._exit(3)
        if self._due("shape_at"):
            return np.zeros(5, np.float32)
        return np.full(4, np.nan, np.float32) if self._due("nan_at") else self.walk

    def _due(self, kind: str) -> bool:
        return self.at.get(kind) == self.age
