"""Sinks for the records of runs that benchmarks watch from within their own process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Sink:
    """Looks at records as they come: nothing is held back, and nothing is to be closed."""

    def write(self, record: Mapping[str, Any]) -> None:
        raise TypeError(f"{type(self).__name__} does not say what it writes down")

    def flush(self) -> None: ...

    def close(self) -> None: ...


class Evaluations(Sink):
    """Keeps what greedy evaluations returned: (step, mean)."""

    def __init__(self) -> None:
        self.curve: list[tuple[int, float]] = []

    def write(self, record: Mapping[str, Any]) -> None:
        if "eval/mean_reward" in record:
            self.curve.append((record["step"], record["eval/mean_reward"]))
