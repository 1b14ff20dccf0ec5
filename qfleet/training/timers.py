"""What part of the wall time each worker of a loop takes."""

from __future__ import annotations

from collections import defaultdict
from time import perf_counter

from qfleet.training.loop import Worker

LEAST_S = 0.05
"""Records may follow each other at once; over less than this a share means nothing, and the next record has it."""


class TimedWorker:
    """A worker, and how long it has worked."""

    def __init__(self, worker: Worker) -> None:
        self._work = worker.step
        self._spent = 0.0
        self._since: float | None = None

    def step(self) -> bool:
        self._since = perf_counter()
        busy = self._work()
        self._spent += perf_counter() - self._since
        self._since = None
        return busy

    def take_seconds(self) -> float:
        """Seconds since this was last asked, those of a step under way included: an evaluation asks at its end."""
        now = perf_counter()
        if self._since is not None:
            self._spent += now - self._since
            self._since = now
        spent, self._spent = self._spent, 0.0
        return spent


class TimeShares:
    """A gauge: for every tag the share of the time since it was last asked, 0 to 1."""

    def __init__(self) -> None:
        self._timed: list[tuple[str, TimedWorker]] = []
        self._booked: dict[str, float] = defaultdict(float)
        self._since = perf_counter()

    def timed(self, tag: str, worker: Worker) -> TimedWorker:
        """The same worker with its time booked under a tag, which others may have, too."""
        timed = TimedWorker(worker)
        self._timed.append((tag, timed))
        return timed

    def add_seconds(self, tag: str, seconds: float) -> None:
        self._booked[tag] += seconds

    def __call__(self) -> dict[str, float]:
        now = perf_counter()
        wall = now - self._since
        if wall < LEAST_S:
            return {}
        self._since = now
        for tag, timed in self._timed:
            self._booked[tag] += timed.take_seconds()
        found = {tag: min(1.0, seconds / wall) for tag, seconds in self._booked.items()}
        self._booked = defaultdict(float, dict.fromkeys(self._booked, 0.0))
        return found
