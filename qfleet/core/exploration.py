"""Protocols of exploration: parameters per lane and per episode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from qfleet.core.agent import ExplorationParams


class Explorer(Protocol):
    def params(self, steps: int) -> ExplorationParams: ...


@runtime_checkable
class AdaptiveExplorer(Protocol):
    """An explorer that chooses an arm for every episode."""

    def params(self, steps: int) -> ExplorationParams: ...

    def seed(self, seed: int) -> None:
        """Before the first step: what all draws come from. Chooses the first arms."""

    def end_episode(self, lane: int, ret: float | None) -> None:
        """An episode is over, and brought so much, unclipped and undiscounted; None if it was broken off."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
