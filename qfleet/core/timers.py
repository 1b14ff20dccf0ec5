"""Where the time of a role goes: milliseconds per turn, written now and then."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from qfleet.core.metrics import Metrics


class PhaseTimer:
    """`start` a turn, book everything since under a tag with each `lap`, and end the turn with `turn`.

    The means over `period` turns are written as figures; a clock is read and nothing else, so no result depends on it.
    """

    def __init__(self, metrics: Metrics, tags: Sequence[str], period: int) -> None:
        self._metrics, self._period = metrics, period
        self._spent = dict.fromkeys(tags, 0.0)
        self._turns = 0
        self._since = 0.0
        self._pause: str | None = None

    def start(self) -> None:
        now = perf_counter()
        if self._pause is not None:
            self._spent[self._pause] += now - self._since
            self._pause = None
        self._since = now

    def lap(self, tag: str) -> None:
        now = perf_counter()
        self._spent[tag] += now - self._since
        self._since = now

    def pause(self, tag: str) -> None:
        """The turn cannot go on: until the next `start`, time belongs to this tag."""
        self._pause = tag

    def end_step(self) -> bool:
        """The turn is over; whether figures were written."""
        self._turns += 1
        if self._turns < self._period:
            return False
        self._metrics.write({tag: 1000 * spent / self._period for tag, spent in self._spent.items()})
        self._spent = dict.fromkeys(self._spent, 0.0)
        self._turns = 0
        return True
