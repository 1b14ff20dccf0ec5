"""One Atari game in Python, frame for frame what ale-py's C++ vector environment plays.

It can be drawn and wrapped, which the vector environment cannot; videos show the very game that a score came from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from qfleet.core.errors import UserError
from qfleet.envs.atari import AtariRules


class AtariGame(gymnasium.Env[np.ndarray, Any]):
    """Observes the newest picture, uint8 [H, W] or [H, W, 3]; `info["lives"]` counts the lives left."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 15}  # noqa: RUF012 (gymnasium's own convention)
    render_mode = "rgb_array"

    def __init__(self, table: AtariRules) -> None:
        try:
            import cv2
        except ImportError:
            raise UserError("pictures of Atari games need OpenCV; pip install 'qfleet[atari]'") from None
        import ale_py

        self._rules, self._cv2 = table, cv2
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        self._rom = Path(ale_py.roms.__file__).with_name(f"{table.rom}.bin")
        self._ale = ale_py.ALEInterface()
        self._ale.setFloat("repeat_action_probability", table.sticky)
        self._ale.loadROM(self._rom)
        self._keys = self._ale.getLegalActionSet() if table.full_action_space else self._ale.getMinimalActionSet()
        self.action_space = spaces.Discrete(len(self._keys))
        shape = (table.size, table.size) if table.grey else (table.size, table.size, 3)
        self.observation_space = spaces.Box(0, 255, shape, np.uint8)
        self._noops = NoopSampler(0)
        self._frames = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, Any]:
        if seed is not None:
            self._ale.setInt("random_seed", seed % 2**31)
            self._ale.loadROM(self._rom)
            self._noops = NoopSampler(seed % 2**31)
        self._ale.reset_game()
        for _ in range(self._noops.draw(self._rules.noop_max)):
            self._ale.act(0)
            if self._ale.game_over():
                self._ale.reset_game()
        self._frames = 0
        self._newest = self._screen()
        self._before = np.zeros_like(self._newest)
        return self._picture(), {"lives": self._ale.lives()}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        reward, over, capped = 0, False, False
        for left in range(self._rules.frame_skip, 0, -1):
            reward += self._ale.act(self._keys[action])
            self._frames += 1
            over, capped = self._ale.game_over(), self._frames >= self._rules.max_frames
            if over or capped:
                break  # the vector environment does not look at the frame that ends a game, either
            if left == 2:
                self._before = self._screen()
            elif left == 1:
                self._newest = self._screen()
        return self._picture(), float(reward), over, capped and not over, {"lives": self._ale.lives()}

    def render(self) -> np.ndarray:
        picture: np.ndarray = self._ale.getScreenRGB()
        return picture

    def _screen(self) -> np.ndarray:
        screen: np.ndarray = self._ale.getScreenGrayscale() if self._rules.grey else self._ale.getScreenRGB()
        return screen

    def _picture(self) -> np.ndarray:
        """The brighter of the last two frames, small: sprites that flicker are drawn in every other frame only."""
        self._newest = np.maximum(self._newest, self._before)
        size = self._rules.size
        if self._newest.shape[:2] == (size, size):
            return self._newest
        picture: np.ndarray = self._cv2.resize(self._newest, (size, size), interpolation=self._cv2.INTER_AREA)
        return picture


class NoopSampler:
    """The numbers of no-ops that the C++ library draws: std::mt19937 under libstdc++'s bounded distribution."""

    def __init__(self, seed: int) -> None:
        self._words = np.random.RandomState(seed)

    def draw(self, bound: int) -> int:
        """Uniform in 0..bound-1 by the upper half of a 64-bit product (Lemire 2019); 0 if bound is 0."""
        bound = max(bound, 1)
        reject = (2**32 - bound) % bound
        while True:
            product = int(self._words.randint(0, 2**32, dtype=np.uint32)) * bound
            if product % 2**32 >= reject:
                return product >> 32
