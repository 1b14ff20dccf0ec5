"""An environment with several observations, and a wrapper with an argument, as Python objects: `python dict_env.py`."""

import sys

import gymnasium
import numpy as np
from gymnasium import spaces

import qfleet


class Courier(gymnasium.Env):
    """Carry an order to its door, left or right, on a battery. Sees a map, the battery and the number of the order."""

    action_space = spaces.Discrete(3)
    observation_space = spaces.Dict({"map": spaces.Box(0, 255, (24, 24), np.uint8),
                                     "battery": spaces.Box(0, 1, (1,)), "order": spaces.Discrete(2)})

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x, self.battery, self.order = 12, 1.0, int(self.np_random.integers(2))
        return self._observe(), {}

    def step(self, action):
        self.x, self.battery = self.x + 2 * (int(action) - 1), self.battery - 0.05
        arrived, right = self.x in (0, 24), self.x == 24 * self.order
        return self._observe(), float(right), arrived or self.battery < 0.05, False, {"success": right}

    def _observe(self):
        view = np.tile(np.uint8(255) * (abs(np.arange(24) - self.x) < 3), (24, 1))
        return {"map": view, "battery": np.float32([self.battery]), "order": self.order}


def with_cost(env, cost):
    return gymnasium.wrappers.TransformReward(env, lambda reward: reward - cost)


result = qfleet.train(env={"id": Courier, "stack": 1}, wrappers=[(with_cost, {"cost": 0.01})], explore={"steps": 3000},
                      replay={"min_steps": 300}, total_steps=int((*sys.argv, 6000)[1]), progress=True)
print("action", qfleet.load(result.directory).act(Courier().reset(seed=0)[0]))
