"""Protocols of explorers, which provide exploration parameters per lane or per episode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from qfleet.core.agent import ExplorationParams


class Explorer(Protocol):
    """Exploration parameters as a function of time."""

    def params(self, steps: int) -> ExplorationParams:
        """Parameters for the next step.

        Args:
            steps: Environment steps of the run so far.

        Returns:
            Parameters of all lanes of this explorer.
        """


@runtime_checkable
class AdaptiveExplorer(Protocol):
    """Explorer with its own state, such as statistics of arms or repetitions in progress."""

    def params(self, steps: int) -> ExplorationParams:
        """Parameters for the next step.

        Args:
            steps: Environment steps of the run so far.

        Returns:
            Parameters of all lanes of this explorer.
        """

    def seed(self, seed: int) -> None:
        """Seed all random draws and start from the initial state; called before the first step.

        Args:
            seed: Seed of this explorer.
        """

    def end_episode(self, lane: int, ret: float | None) -> None:
        """Report the end of an episode.

        Args:
            lane: Index of the lane.
            ret: Unclipped, undiscounted return; None if the episode was aborted.
        """

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint.

        Returns:
            Values that JSON or an array can hold, generators included.
        """

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state.

        Args:
            state: Result of `state_dict`.
        """
