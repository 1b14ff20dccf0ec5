"""An environment of your own: bring a boat to rest at the pier.

    qfleet check-env custom_env:Dock-v0
    qfleet train custom_env:Dock-v0 total_steps=40_000 env.kwargs.force=0.02
"""

import gymnasium
import numpy as np
from gymnasium import spaces


class Dock(gymnasium.Env):
    """A boat on a line, observed as float32 [2]: distance to the pier and speed. Push left, drift or push right."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012 (gymnasium's own convention)

    def __init__(self, force: float = 0.02, render_mode: str | None = None) -> None:
        self.force, self.render_mode = force, render_mode
        self.observation_space = spaces.Box(-2, 2, (2,), np.float32)
        self.action_space = spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)  # seeds self.np_random, the only place to draw from
        self.x, self.speed = self.np_random.uniform(-1, 1), 0.0
        return self._observe(), {}

    def step(self, action):
        self.speed = np.clip(0.98 * self.speed + self.force * (action - 1), -0.2, 0.2)
        self.x = np.clip(self.x + self.speed, -2, 2)
        docked = abs(self.x) < 0.05 and abs(self.speed) < 0.02
        return self._observe(), 1.0 if docked else -0.01, docked, False, {}

    def render(self):
        picture = np.full((60, 240, 3), 235, np.uint8)
        picture[:, 118:122] = (90, 90, 90)
        at = int(120 + 59 * self.x)
        picture[25:35, max(at - 6, 0):at + 6] = (0, 114, 178)
        return picture

    def _observe(self):
        return np.array([self.x, self.speed], np.float32)


# The limit truncates an episode: time runs out, but the future is still worth something, and the agent knows.
gymnasium.register("Dock-v0", entry_point=Dock, max_episode_steps=100)
