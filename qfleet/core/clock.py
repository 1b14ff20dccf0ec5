"""Clocks of a run, and schedules by them. Environment steps are counted when they are taken."""

from __future__ import annotations

from typing import NamedTuple, Protocol


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
