"""Protocols of explorers, which provide exploration parameters per lane or per episode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from qfleet.core.agent import ExplorationParams


class Explorer(Protocol):
    def params(self, steps: int) -> ExplorationParams: ...


@runtime_checkable
class AdaptiveExplorer(Protocol):
    """Explorer with a state of its own: arms chosen by the returns of earlier episodes, or running repetitions."""

    def params(self, steps: int) -> ExplorationParams: ...

    def seed(self, seed: int) -> None:
        """Seed all random draws and start from the initial state; called before the first step."""

    def end_episode(self, lane: int, ret: float | None) -> None:
        """Report the end of an episode with its unclipped, undiscounted return; None if it was aborted."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
