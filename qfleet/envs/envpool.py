"""EnvPool's environments as Gymnasium vector environments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from qfleet.core.errors import UserError


def is_envpool(env: Any) -> bool:
    """True for an environment of `envpool.make_gymnasium`, which is a `gymnasium.Env` before EnvPool 1.2."""
    config = getattr(env, "config", None)
    return isinstance(config, Mapping) and {"num_envs", "batch_size"} <= config.keys() and hasattr(env, "recv")


class EnvPoolVectorEnv(VectorEnv[Any, Any, Any]):
    """An EnvPool as a vector environment whose steps can be sent and received separately.

    What EnvPool does differently: its spaces are those of one environment, `reset` takes no seed, since the seed is an
    argument of its constructor, and before version 1.2 it is no `VectorEnv`. It resets an environment in the step after
    its episode has ended, as Gymnasium does by default.
    """

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012 (gymnasium's own convention)

    def __init__(self, pool: Any) -> None:
        self._pool, self.num_envs = pool, int(pool.config["num_envs"])
        if pool.config["batch_size"] not in (0, self.num_envs):
            raise UserError(f"this EnvPool returns batches of {pool.config['batch_size']} of its {self.num_envs} "
                            "environments: leave batch_size out, so that every step is one of all environments")
        self.single_observation_space, self.single_action_space = pool.observation_space, pool.action_space
        self.observation_space = batch_space(pool.observation_space, self.num_envs)
        self.action_space = batch_space(pool.action_space, self.num_envs)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start new episodes in all environments. The seed has no effect."""
        obs, info = self._pool.reset()
        return obs, info

    def step_async(self, actions: np.ndarray) -> None:
        """Start a step of all environments."""
        self._pool.send(actions)

    def step_wait(self) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Wait for the step."""
        obs, reward, terminated, truncated, info = self._pool.recv()
        return obs, reward, terminated, truncated, info

    def step(self, actions: np.ndarray) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        self.step_async(actions)
        return self.step_wait()

    def render(self) -> Any:
        return self._pool.render()

    def close_extras(self, **kwargs: Any) -> None:
        self._pool.close()
