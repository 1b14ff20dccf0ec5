"""An environment that hangs says so: all stacks, then exit 1, instead of silence for ever."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Sequence

import numpy as np

from qfleet.types import Obs, Outcome, VectorEnv


class Watched:
    """A vector environment whose `reset` and `recv` may not take longer than `limit_s` seconds."""

    def __init__(self, env: VectorEnv, limit_s: float) -> None:
        self.env, self.limit_s = env, limit_s
        self.spec, self.lanes = env.spec, env.lanes
        self._since: float | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def reset(self, seeds: Sequence[int]) -> Obs:
        self._since = time.monotonic()
        obs = self.env.reset(seeds)
        self._since = None
        return obs

    def send(self, actions: np.ndarray) -> None:
        self.env.send(actions)

    def recv(self) -> Outcome:
        self._since = time.monotonic()
        outcome = self.env.recv()
        self._since = None
        return outcome

    def render(self) -> np.ndarray | None:
        return self.env.render()

    def faults(self) -> int:
        return self.env.faults()

    def close(self) -> None:
        self._closed.set()
        self.env.close()

    def _watch(self) -> None:
        while not self._closed.wait(min(1.0, self.limit_s / 4)):
            since = self._since
            if since is not None and time.monotonic() - since > self.limit_s:
                with contextlib.suppress(Exception):  # whatever became of stderr, the end must come
                    print(f"the environment {self.spec.id} has not answered for {self.limit_s:g} s "
                          "(run.stall_timeout_s); env.isolate=true with env.step_timeout_s survives that. "
                          "Where every thread stands:", file=sys.stderr, flush=True)
                    faulthandler.dump_traceback(2)
                os._exit(1)
