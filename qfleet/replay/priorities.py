"""Which start is drawn how often: priorities cleaned at the door, and the weights that correct for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from qfleet.replay.sum_tree import SumTree

MIN_PRIORITY, MAX_PRIORITY = 1e-6, 1e6
"""Range of a priority: whatever lies outside, or is not a number, is clamped and counted."""


def clamp_priorities(priority: np.ndarray) -> tuple[np.ndarray, float, int]:
    """Priorities within their range, the largest of those that were, and how many were not."""
    given = np.asarray(priority, np.float64)
    least, most = given.min(initial=1.0), given.max(initial=1.0)
    if least >= MIN_PRIORITY and most <= MAX_PRIORITY:  # false for NaN
        return given, float(most), 0
    sane = (given >= MIN_PRIORITY) & (given <= MAX_PRIORITY)
    # One absurd value must not raise every chunk to come, so only sane ones count as the largest.
    most = float(given[sane].max(initial=0.0))
    values = np.clip(
        np.nan_to_num(given, nan=MIN_PRIORITY, posinf=MAX_PRIORITY, neginf=MIN_PRIORITY), MIN_PRIORITY, MAX_PRIORITY
    )
    return values, most, int((~sane).sum())


class Priorities:
    """Leaves hold priority ** alpha, 0 for what must not be drawn. With alpha = 0 every valid start is equal.

    New starts without a priority get the largest one seen, so that everything is soon looked at once.
    """

    def __init__(self, leaves: int, alpha: float) -> None:
        self.tree = SumTree(leaves)
        self.alpha = alpha
        self.largest = 1.0
        self.clamped = 0

    def write(self, leaves: np.ndarray, priority: np.ndarray | None, valid: np.ndarray) -> None:
        """Set fresh leaves [S]; those not valid become 0."""
        if self.alpha == 0:
            values = np.ones(len(leaves))
        elif priority is None:
            values = np.full(len(leaves), self.largest ** self.alpha)
        else:
            values = self._clean(np.where(valid, priority, 1.0)) ** self.alpha
        self.tree.set(leaves, np.where(valid, values, 0.0))

    def update(self, leaves: np.ndarray, priority: np.ndarray) -> None:
        """Change leaves after a look at them; those that are 0 stay 0."""
        if self.alpha > 0:
            self.tree.change(leaves, self._clean(priority) ** self.alpha)

    def draw(self, uniforms: np.ndarray, beta: float, size: int) -> tuple[np.ndarray, np.ndarray, float]:
        """Leaves int64 [B], one from each of B equal shares of the total (stratified), in ascending order, given B
        numbers in [0, 1); importance weights float32 [B]: (N P(i)) ** -beta over their maximum, where N and the total
        cancel out; and that maximum, for N = `size`."""
        uniforms += np.arange(len(uniforms))
        uniforms /= len(uniforms)
        leaves, values = self.tree.sample(uniforms)
        if self.alpha == 0:
            return leaves, np.ones(len(leaves), np.float32), 1.0
        least = values.min()
        weight = (least / values).astype(np.float32) ** np.float32(beta)
        return leaves, weight, float(size * least / self.tree.total) ** -beta

    def _clean(self, priority: np.ndarray) -> np.ndarray:
        values, most, clamped = clamp_priorities(priority)
        self.largest = max(self.largest, most)
        self.clamped += clamped
        return values

    def get(self, leaves: np.ndarray) -> np.ndarray:
        return self.tree.get(leaves)

    def set(self, leaves: np.ndarray, values: np.ndarray) -> None:
        self.tree.set(leaves, values)

    def fill(self, values: np.ndarray) -> None:
        """Write all leaves at once."""
        self.tree.fill(values)

    def resize(self, values: np.ndarray) -> None:
        """From now on there are as many leaves as these values, which they have."""
        self.tree = SumTree(len(values))
        self.tree.fill(values)

    def total(self) -> float:
        return self.tree.total

    def state_dict(self) -> dict[str, Any]:
        return {"largest": self.largest, "clamped": self.clamped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.largest, self.clamped = float(state["largest"]), int(state["clamped"])
