"""Periodic schedules in environment steps or updates."""

from __future__ import annotations

from typing import NamedTuple


class Progress(NamedTuple):
    """Environment steps taken and updates made."""

    steps: int
    updates: int


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
