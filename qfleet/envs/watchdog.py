"""An environment that hangs says so: all stacks, then exit 1, instead of silence for ever."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
from collections.abc import Sequence

import numpy as np

from qfleet.core.env import Obs, StepResult, VectorEnv


class WatchdogEnv:
    """A vector environment whose `reset` and `recv` may not take longer than `limit_s` seconds.

    Time is counted in the watcher's own ticks: a process that was stopped as a whole, and a machine that slept, are no
    fault of the environment's.
    """

    def __init__(self, env: VectorEnv, limit_s: float) -> None:
        self.env, self.limit_s = env, limit_s
        self.spec, self.lanes = env.spec, env.lanes
        self._call: object | None = None  # the call under way
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def reset(self, seeds: Sequence[int]) -> Obs:
        self._call = object()
        try:
            return self.env.reset(seeds)
        finally:
            self._call = None

    def send(self, actions: np.ndarray) -> None:
        self.env.send(actions)

    def recv(self) -> StepResult:
        self._call = object()
        try:
            return self.env.recv()
        finally:
            self._call = None

    def render(self) -> np.ndarray | None:
        return self.env.render()

    def faults(self) -> int:
        return self.env.faults()

    def close(self) -> None:
        self._closed.set()
        self.env.close()

    def _watch(self) -> None:
        tick_s, call, ticks = min(1.0, self.limit_s / 4), None, 0
        while not self._closed.wait(tick_s):
            before, call = call, self._call
            ticks = ticks + 1 if call is before else 0
            if call is not None and ticks * tick_s >= self.limit_s:
                with contextlib.suppress(Exception):  # whatever became of stderr, the end must come
                    print(f"the environment {self.spec.id} has not answered for {self.limit_s:g} s "
                          "(run.stall_timeout_s); env.isolate=true with env.step_timeout_s survives that. "
                          "Where every thread stands:", file=sys.stderr, flush=True)
                    faulthandler.dump_traceback(2)
                os._exit(1)
