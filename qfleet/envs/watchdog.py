"""Watchdog for hanging environments: prints all stacks and exits with status 1."""

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
    """Vector environment whose `reset` and `recv` must not take longer than `limit_s` seconds.

    Time is counted in ticks of the watchdog thread, so that a stopped process or a suspended machine does not count
    against the environment.
    """

    def __init__(self, env: VectorEnv, limit_s: float) -> None:
        self.env, self.limit_s = env, limit_s
        self.spec, self.lanes = env.spec, env.lanes
        self._call: object | None = None  # the current call
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
                with contextlib.suppress(Exception):  # exit even if stderr is unusable
                    print(f"the environment {self.spec.id} has not answered for {self.limit_s:g} s "
                          "(run.stall_timeout_s); env.isolate=true with env.step_timeout_s replaces a "
                          "hanging environment. Stacks of all threads:", file=sys.stderr, flush=True)
                    faulthandler.dump_traceback(2)
                os._exit(1)
