"""Clocks of a run: environment steps, counted when they are taken."""

from __future__ import annotations

from typing import Protocol


class StepClock(Protocol):
    """Counts the environment steps of a run, as an actor sees it."""

    @property
    def steps(self) -> int:
        """Environment steps of the whole run, as far as this process knows."""

    def count_steps(self, steps: int) -> None: ...


class RunClock:
    """The step clock of a learner's process.

    `local_steps` are those of the actors that feed this learner's replay; the rate limiter uses these alone.
    `remote_steps` are those of all other learners of the run.
    """

    def __init__(self) -> None:
        self.local_steps = 0
        self.remote_steps = 0

    @property
    def steps(self) -> int:
        return self.local_steps + self.remote_steps

    def count_steps(self, steps: int) -> None:
        self.local_steps += steps
