"""Timing of the phases of a loop: mean milliseconds per iteration."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from qfleet.core.metrics import Metrics


class PhaseTimer:
    """Measures the phases of a loop: `start` an iteration, end each phase with `lap(tag)`, the
    iteration with `end_step`.

    Writes the means over `period` iterations as metrics. It only reads a clock, so no result
    depends on it.
    """

    def __init__(self, metrics: Metrics, tags: Sequence[str], period: int) -> None:
        self._metrics, self._period = metrics, period
        self._spent = dict.fromkeys(tags, 0.0)
        self._iterations = 0
        self._phase_start = 0.0
        self._paused_tag: str | None = None

    def start(self) -> None:
        now = perf_counter()
        if self._paused_tag is not None:
            self._spent[self._paused_tag] += now - self._phase_start
            self._paused_tag = None
        self._phase_start = now

    def lap(self, tag: str) -> None:
        now = perf_counter()
        self._spent[tag] += now - self._phase_start
        self._phase_start = now

    def pause(self, tag: str) -> None:
        """Suspend the iteration: the time until the next `start` counts for `tag`."""
        self._paused_tag = tag

    def end_step(self) -> bool:
        """End the iteration; True if metrics were written."""
        self._iterations += 1
        if self._iterations < self._period:
            return False
        self._metrics.write({tag: 1000 * spent / self._period for tag, spent in self._spent.items()})
        self._spent = dict.fromkeys(self._spent, 0.0)
        self._iterations = 0
        return True
