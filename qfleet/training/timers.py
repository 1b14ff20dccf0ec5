"""Shares of the wall time by worker of the main loop."""

from __future__ import annotations

from collections import defaultdict
from time import perf_counter

from qfleet.training.loop import Worker

MIN_PERIOD_S = 0.05
"""Shortest period to compute shares over. Records may follow each other immediately; shares over a shorter period are
meaningless, so its time is counted in the next record."""


class TimedWorker:
    """Wraps a worker and measures the time of its steps."""

    def __init__(self, worker: Worker) -> None:
        self._step = worker.step
        self._elapsed = 0.0
        self._since: float | None = None

    def step(self) -> bool:
        self._since = perf_counter()
        busy = self._step()
        self._elapsed += perf_counter() - self._since
        self._since = None
        return busy

    def take_seconds(self) -> float:
        """Seconds since the last call. Includes a running step: an evaluation emits its record from within `step`."""
        now = perf_counter()
        if self._since is not None:
            self._elapsed += now - self._since
            self._since = now
        elapsed, self._elapsed = self._elapsed, 0.0
        return elapsed


class TimeShares:
    """Gauge: for every tag its share of the wall time since the last call, 0 to 1."""

    def __init__(self) -> None:
        self._timed: list[tuple[str, TimedWorker]] = []
        self._seconds: dict[str, float] = defaultdict(float)
        self._since = perf_counter()
        self._stopped_at: float | None = None

    def stop_clock(self) -> None:
        """Count no wall time until `start_clock`; no timed worker may be stepped meanwhile."""
        if self._stopped_at is None:
            self._stopped_at = perf_counter()

    def start_clock(self) -> None:
        if self._stopped_at is not None:
            self._since += perf_counter() - self._stopped_at
            self._stopped_at = None

    def timed(self, tag: str, worker: Worker) -> TimedWorker:
        """Wrap a worker; its time is added to `tag`. Several workers may share a tag."""
        timed = TimedWorker(worker)
        self._timed.append((tag, timed))
        return timed

    def add_seconds(self, tag: str, seconds: float) -> None:
        self._seconds[tag] += seconds

    def __call__(self) -> dict[str, float]:
        now = perf_counter() if self._stopped_at is None else self._stopped_at
        wall = now - self._since
        if wall < MIN_PERIOD_S:
            return {}
        self._since = now
        for tag, timed in self._timed:
            self._seconds[tag] += timed.take_seconds()
        shares = {tag: min(1.0, seconds / wall) for tag, seconds in self._seconds.items()}
        self._seconds = defaultdict(float, dict.fromkeys(self._seconds, 0.0))
        return shares
