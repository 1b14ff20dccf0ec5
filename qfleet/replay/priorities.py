"""Proportional prioritisation (PER): priorities in a sum tree, and importance-sampling weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from qfleet.replay.sum_tree import SumTree

MIN_PRIORITY, MAX_PRIORITY = 1e-6, 1e6
"""Range of a priority. Values outside it and NaN are clamped and counted."""


def clamp_priorities(priority: np.ndarray) -> tuple[np.ndarray, float, int]:
    """Return the clamped priorities, the largest one that needed no clamping, and the number of clamped ones."""
    given = np.asarray(priority, np.float64)
    smallest, largest = given.min(initial=1.0), given.max(initial=1.0)
    if smallest >= MIN_PRIORITY and largest <= MAX_PRIORITY:  # false for NaN
        return given, float(largest), 0
    in_range = (given >= MIN_PRIORITY) & (given <= MAX_PRIORITY)
    # One clamped value must not raise the initial priority of all later chunks: only values in range count.
    largest = float(given[in_range].max(initial=0.0))
    values = np.clip(
        np.nan_to_num(given, nan=MIN_PRIORITY, posinf=MAX_PRIORITY, neginf=MIN_PRIORITY), MIN_PRIORITY, MAX_PRIORITY
    )
    return values, largest, int((~in_range).sum())


class Priorities:
    """Priorities of all starts: leaves hold priority ** alpha, 0 for starts that must not be sampled.

    With alpha = 0 all valid starts are equally likely. New starts without a priority get the largest priority seen, so
    that every start is likely to be sampled soon.
    """

    def __init__(self, leaves: int, alpha: float) -> None:
        self.tree = SumTree(leaves)
        self.alpha = alpha
        self.largest = 1.0
        self.clamped = 0

    def write(self, leaves: np.ndarray, priority: np.ndarray | None, valid: np.ndarray) -> None:
        """Set the leaves [S] of a new chunk; leaves that are not `valid` become 0."""
        if self.alpha == 0:
            values = np.ones(len(leaves))
        elif priority is None:
            values = np.full(len(leaves), self.largest ** self.alpha)
        else:
            values = self._clamp(np.where(valid, priority, 1.0)) ** self.alpha
        self.tree.set(leaves, np.where(valid, values, 0.0))

    def update(self, leaves: np.ndarray, priority: np.ndarray) -> None:
        """Set new priorities of sampled leaves; leaves that are 0 stay 0."""
        if self.alpha > 0:
            self.tree.change(leaves, self._clamp(priority) ** self.alpha)

    def draw(self, uniforms: np.ndarray, beta: float, size: int) -> tuple[np.ndarray, np.ndarray, float]:
        """Stratified sample: leaves int64 [B], one from each B-th of the total, ascending; `uniforms` [B] in [0, 1).

        Also returns the importance weights, float32 [B]: (N P(i)) ** -beta divided by their maximum, where N and the
        total cancel out; and that maximum, for N = `size`. Overwrites `uniforms`.
        """
        uniforms += np.arange(len(uniforms))
        uniforms /= len(uniforms)
        leaves, values = self.tree.sample(uniforms)
        if self.alpha == 0:
            return leaves, np.ones(len(leaves), np.float32), 1.0
        least = values.min()
        weight = (least / values).astype(np.float32) ** np.float32(beta)
        return leaves, weight, float(size * least / self.tree.total) ** -beta

    def _clamp(self, priority: np.ndarray) -> np.ndarray:
        """Clamp priorities, and update the largest one seen and the count of clamped ones."""
        values, largest, clamped = clamp_priorities(priority)
        self.largest = max(self.largest, largest)
        self.clamped += clamped
        return values

    def get(self, leaves: np.ndarray) -> np.ndarray:
        return self.tree.get(leaves)

    def set(self, leaves: np.ndarray, values: np.ndarray) -> None:
        self.tree.set(leaves, values)

    def fill(self, values: np.ndarray) -> None:
        """Set all leaves."""
        self.tree.fill(values)

    def resize(self, values: np.ndarray) -> None:
        """Replace the tree by one with these leaves."""
        self.tree = SumTree(len(values))
        self.tree.fill(values)

    def total(self) -> float:
        return self.tree.total

    def state_dict(self) -> dict[str, Any]:
        return {"largest": self.largest, "clamped": self.clamped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.largest, self.clamped = float(state["largest"]), int(state["clamped"])
