"""Other processes on the same cores: how busy those are with them, and what a run does about it.

Threads of one operation wait for each other. Where another process has taken the core of one of them, all wait for that
one, and two threads are several times slower than one alone.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from qfleet.runtime.threads import MOST_PARTS, usable_cores

log = logging.getLogger(__name__)

PERIOD_S = 1.0
PATIENCE = 3
"""Looks in a row before somebody is told, or threads are taken back: what is over soon needs neither."""

IDLE = (3, 4)
"""Places of the idle times in a line of /proc/stat: waiting for a disk is one of them, too."""


class Neighbours:
    """Called: how many of the cores that this process may use others have kept busy since the last call; None where
    that cannot be known, as under a quota, which says how much and not where."""

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
        self._lines = {f"cpu{core}" for core in cores} if usable_cores() == len(cores) else set()
        self._before = self._now()

    def __call__(self) -> float | None:
        before, self._before = self._before, self._now()
        if before is None or self._before is None:
            return None
        (total, busy, mine), (total_then, busy_then, mine_then) = self._before, before
        if total == total_then:
            return None
        seconds = (total - total_then) / len(self._lines)
        return max(0.0, (busy - busy_then - (mine - mine_then)) / seconds)

    def _now(self) -> tuple[float, float, float] | None:
        """Seconds of all our cores, those in which they were busy, and those in which they were so for us."""
        tick = os.sysconf("SC_CLK_TCK")
        try:
            rows = [line.split() for line in self._stat.read_text().splitlines()]
            found = [[int(word) / tick for word in row[1:9]] for row in rows if row and row[0] in self._lines]
        except (OSError, ValueError):
            return None
        if not found or any(len(times) < 5 for times in found):
            return None
        idle = sum(times[at] for times in found for at in IDLE)
        total = sum(map(sum, found))
        return total, total - idle, time.process_time()


class Courtesy:
    """A worker that looks at the neighbours every second. It leaves them the cores that they keep busy (`share`), and
    takes these back when they have been idle for a while; or it says once that this would be faster."""

    def __init__(self, threads: int, cores: int, share: bool, neighbours: Callable[[], float | None] | None = None,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._threads, self._cores, self._share, self._clock = threads, cores, share, clock
        self._neighbours = neighbours or Neighbours()
        self._taken, self._alike, self._said, self._since = threads, 0, False, clock()

    def step(self) -> bool:
        now = self._clock()
        if now - self._since < PERIOD_S:
            return False
        self._since = now
        others = self._neighbours()
        if others is not None:
            self._meet(others)
        return False

    def _meet(self, others: float) -> None:
        left = max(1, min(self._threads, self._cores - int(others + 0.5)))
        self._alike = self._alike + 1 if left != self._taken else 0
        if not self._share and self._alike == PATIENCE:
            parts = self._threads <= MOST_PARTS
            self._tell("other processes keep %.1f cores busy, and torch's %d threads wait for each other: "
                       "run.share_cores=true takes fewer while it lasts, but the run is no longer reproducible to the "
                       "last digit; with "
                       + (f"learner.parts={self._threads}, if the agent allows it, or " if parts else "")
                       + "run.threads=1 it is", others, self._threads)
        if self._share and (left < self._taken or self._alike == PATIENCE):
            self._tell("other processes keep %.1f cores busy: torch takes %d of %d threads while it lasts", others,
                       left, self._threads)
            torch.set_num_threads(left)
            self._taken, self._alike = left, 0

    def _tell(self, text: str, *figures: float) -> None:
        """Once: it may come and go for as long as the run lasts."""
        if not self._said:
            log.log(logging.INFO if self._share else logging.WARNING, text, *figures)
        self._said = True
