"""Protocol of metric sinks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from qfleet.core.episode import Episode


class Metrics(Protocol):
    """Metric sink. Values of `write` are averaged over a log period; counters accumulate."""

    def write(self, values: Mapping[str, float]) -> None: ...
    def count(self, name: str, by: int = 1) -> None: ...
    def episode(self, episode: Episode) -> None: ...
