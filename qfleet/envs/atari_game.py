"""Single Atari game in Python, frame for frame identical to ale-py's C++ vector environment.

Unlike the vector environment it can be rendered and wrapped, so videos show the same game that a score came from.
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
    """Observes the newest image, uint8 [H, W] or [H, W, 3]; `info["lives"]` is the number of lives left."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 15}  # noqa: RUF012 (gymnasium's own convention)
    render_mode = "rgb_array"

    def __init__(self, rules: AtariRules) -> None:
        try:
            import cv2
        except ImportError:
            raise UserError("rendering or wrapping Atari games needs OpenCV; pip install 'qfleet[atari]'") from None
        import ale_py

        self._rules, self._cv2 = rules, cv2
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        self._rom = Path(ale_py.roms.__file__).with_name(f"{rules.rom}.bin")
        self._ale = ale_py.ALEInterface()
        self._ale.setFloat("repeat_action_probability", rules.sticky)
        self._ale.loadROM(self._rom)
        self._keys = self._ale.getLegalActionSet() if rules.full_action_space else self._ale.getMinimalActionSet()
        self.action_space = spaces.Discrete(len(self._keys))
        shape = (rules.size, rules.size) if rules.grey else (rules.size, rules.size, 3)
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
        return self._observe(), {"lives": self._ale.lives()}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        reward, over, capped = 0, False, False
        for left in range(self._rules.frame_skip, 0, -1):
            reward += self._ale.act(self._keys[action])
            self._frames += 1
            over, capped = self._ale.game_over(), self._frames >= self._rules.max_frames
            if over or capped:
                break  # like the vector environment, which does not read the final frame
            if left == 2:
                self._before = self._screen()
            elif left == 1:
                self._newest = self._screen()
        return self._observe(), float(reward), over, capped and not over, {"lives": self._ale.lives()}

    def render(self) -> np.ndarray:
        image: np.ndarray = self._ale.getScreenRGB()
        return image

    def _screen(self) -> np.ndarray:
        screen: np.ndarray = self._ale.getScreenGrayscale() if self._rules.grey else self._ale.getScreenRGB()
        return screen

    def _observe(self) -> np.ndarray:
        """Pixel-wise maximum of the last two frames, resized; sprites that flicker appear in every other frame only."""
        self._newest = np.maximum(self._newest, self._before)
        size = self._rules.size
        if self._newest.shape[:2] == (size, size):
            return self._newest
        image: np.ndarray = self._cv2.resize(self._newest, (size, size), interpolation=self._cv2.INTER_AREA)
        return image


class NoopSampler:
    """No-op counts as drawn by the C++ library: std::mt19937 with libstdc++'s bounded uniform distribution."""

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
