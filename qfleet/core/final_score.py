"""Score of a finished run: its best policy over fresh episodes. Needs neither numpy nor torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeGuard


@dataclass(frozen=True)
class FinalScore:
    """Mean return of a run's best policy over fresh episodes, which are played after the training.

    The best evaluation is a maximum of several, which overestimates the policy; this score does not.

    Attributes:
        mean: Mean return, unclipped.
        standard_error: Standard error of the mean; None for a single episode.
        episodes: Number of episodes.
        seed: Seed of the episodes.
        checkpoint: Name of the policy's checkpoint in the run directory.
    """

    mean: float
    standard_error: float | None
    episodes: int
    seed: int
    checkpoint: str

    @classmethod
    def from_json(cls, found: object) -> FinalScore | None:
        """Read a score that was stored as JSON.

        Args:
            found: Stored value.

        Returns:
            The score; None if there is none, or if it is malformed.
        """
        if not isinstance(found, Mapping):
            return None
        mean, error = found.get("mean"), found.get("standard_error")
        episodes, seed, checkpoint = (found.get(name) for name in ("episodes", "seed", "checkpoint"))
        if not _is_number(mean) or not (error is None or _is_number(error)):
            return None
        if not (isinstance(episodes, int) and isinstance(seed, int) and isinstance(checkpoint, str)):
            return None
        return cls(float(mean), error, episodes, seed, checkpoint)


def standard_error(std: float, episodes: int) -> float | None:
    """Standard error of a mean return, given the standard deviation from `np.std`; None for a single episode."""
    return std / math.sqrt(episodes - 1) if episodes > 1 else None


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
