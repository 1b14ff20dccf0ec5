"""An environment for tests of info metrics, by a name that actors and learners can import."""

import gymnasium
import numpy as np
from gymnasium import spaces


class Told(gymnasium.Env):
    """Ends after four steps of cost 0.5, and succeeds in every episode of an even number of its instance."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self):
        self.episode = -1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.episode = 0, self.episode + 1
        return self._observe(), {}

    def step(self, action):
        self.t += 1
        info = {"cost": 0.5, "nested": {"episode": self.episode}}
        if self.t == 4:
            info["success"] = self.episode % 2 == 0
        return self._observe(), 1.0, self.t == 4, False, info

    def _observe(self):
        return self.np_random.uniform(-1, 1, 2).astype(np.float32)
