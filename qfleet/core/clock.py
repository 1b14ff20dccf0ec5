"""Clocks of a run, schedules by them, and the timer of a loop. Environment steps are counted when they are taken."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple, Protocol

from qfleet.core.metrics import Metrics


class StepClock(Protocol):
    """Counts the environment steps of a run, as an actor sees it."""

    @property
    def steps(self) -> int:
        """Environment steps of the whole run, as far as this process knows."""

    def count_steps(self, steps: int) -> None: ...


class Progress(NamedTuple):
    """Environment steps taken and updates made."""

    steps: int
    updates: int


class RunClock:
    """The clock of a learner's process, created before everything that reads it.

    `local_steps` are those of the actors that feed this learner's replay; the rate limiter uses these alone.
    `remote_steps` are those of all other learners of the run. `updates` are those of the run.
    """

    def __init__(self) -> None:
        self.local_steps = 0
        self.remote_steps = 0
        self.updates = 0

    @property
    def steps(self) -> int:
        return self.local_steps + self.remote_steps

    def count_steps(self, steps: int) -> None:
        self.local_steps += steps

    def set_local_steps(self, steps: int) -> None:
        self.local_steps = steps

    def set_remote_steps(self, steps: int) -> None:
        self.remote_steps = steps

    def set_updates(self, updates: int) -> None:
        self.updates = updates

    def progress(self) -> Progress:
        return Progress(self.steps, self.updates)


class Schedule:
    """`due(now)` is true once per period. Skipped periods are not made up for; no period means never."""

    def __init__(self, period_steps: int | None, period_updates: int | None) -> None:
        self.period_steps, self.period_updates = period_steps, period_updates
        self.index = 0

    def due(self, now: Progress) -> bool:
        index = self._index(now)
        if index <= self.index:
            return False
        self.index = index
        return True

    def _index(self, now: Progress) -> int:
        if self.period_updates:
            return now.updates // self.period_updates
        return now.steps // self.period_steps if self.period_steps else 0

    def resume(self, now: Progress) -> None:
        """Continue from `now`: everything due before it counts as done."""
        self.index = self._index(now)


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
