"""The protocol of a metric sink inside a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Metrics(Protocol):
    """Takes figures by tag. Means are taken over a log period, counters are kept as they are."""

    def write(self, values: Mapping[str, float]) -> None: ...
    def count(self, name: str, by: int = 1) -> None: ...
    def episode(self, lane: int, ret: float, length: int) -> None: ...
