"""The end of an episode, as metrics, evaluations and callbacks receive it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Episode:
    """A completed episode.

    Attributes:
        reward: Return: the sum of its rewards, unclipped and undiscounted.
        length: Number of its steps.
        lane: Number of its environment within its group.
        actor: Index of the process that sent it: an actor, or with sync=server a learner. None if this process or
            another rank stepped the environment.
        info: Values of `env.info_metrics`, by name, without those that were missing in `info`.
        final_info: `info` of the last step as the environment returned it; None if another process stepped it.
    """

    reward: float
    length: int
    lane: int = 0
    actor: int | None = None
    info: Mapping[str, float] = field(default_factory=dict)
    final_info: Mapping[str, Any] | None = None


def mean_info(episodes: Iterable[Episode]) -> dict[str, float]:
    """Mean of each info metric over the episodes that have it."""
    values: dict[str, list[float]] = {}
    for episode in episodes:
        for name, value in episode.info.items():
            values.setdefault(name, []).append(value)
    return {name: sum(found) / len(found) for name, found in values.items()}
