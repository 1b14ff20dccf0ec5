"""Environment that is built on first use: sixty emulators take seconds to start."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from qfleet.core.env import EnvSpec, Obs, StepResult, VectorEnv


class LazyEnv:
    """VectorEnv that calls `build` at the first reset; `spec` describes the environment before that."""

    def __init__(self, build: Callable[[], VectorEnv], spec: EnvSpec, lanes: int) -> None:
        self.spec, self.lanes = spec, lanes
        self._build = build
        self._env: VectorEnv | None = None

    def reset(self, seeds: Sequence[int]) -> Obs:
        if self._env is None:
            self._env = self._build()
        return self._env.reset(seeds)

    def send(self, actions: np.ndarray) -> None:
        self._require_env().send(actions)

    def recv(self) -> StepResult:
        return self._require_env().recv()

    def render(self) -> np.ndarray | None:
        return self._env.render() if self._env is not None else None

    def faults(self) -> int:
        return self._env.faults() if self._env is not None else 0

    def close(self) -> None:
        if self._env is not None:
            self._env.close()

    def _require_env(self) -> VectorEnv:
        if self._env is None:
            raise RuntimeError("send() or recv() was called before reset()")
        return self._env
