"""Priorities as one array on a device: drawn by cumulative sum and search, changed in place, nothing waits for them.

A tree would need a step per level; a GPU adds up a million leaves in less time than it takes to start ten operations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from qfleet.replay.priorities import MAX_PRIORITY, MIN_PRIORITY, clamp_priorities

BELOW_ONE = 1 - 2.0**-40
"""Points of the total stay below it: a sum that was rounded up would belong to no leaf."""


class DevicePriorities:
    """Leaves hold priority ** alpha in float64, 0 for what must not be drawn: as `Priorities` does, on a device."""

    def __init__(self, leaves: int, alpha: float, device: torch.device) -> None:
        self.alpha, self.device = alpha, device
        self.leaves = torch.zeros(leaves, dtype=torch.float64, device=device)
        self.largest = torch.ones((), dtype=torch.float64, device=device)
        self.clamped = torch.zeros((), dtype=torch.int64, device=device)
        self.beta = torch.ones((), device=device)
        self._sums = torch.zeros_like(self.leaves)
        self._strata = torch.zeros(0, device=device)
        self._shown = 1.0

    @property
    def nbytes(self) -> int:
        return 2 * self.leaves.nbytes

    def set_beta(self, beta: float) -> None:
        """The importance exponent of draws to come."""
        if beta != self._shown:
            self.beta.fill_(beta)
            self._shown = beta

    def write(self, leaves: np.ndarray, priority: np.ndarray | None, valid: np.ndarray) -> None:
        """Set fresh leaves [S], which are consecutive; those not valid become 0."""
        room = self.leaves[int(leaves[0]):int(leaves[-1]) + 1]
        if self.alpha > 0 and priority is not None:
            values, most, clamped = clamp_priorities(np.where(valid, priority, 1.0))
            self._note(most, clamped)
            room.copy_(self._there(np.where(valid, values ** self.alpha, 0.0)), non_blocking=True)
            return
        room.copy_(self._there(valid.astype(np.float64)), non_blocking=True)
        if self.alpha > 0:
            room.mul_(self.largest ** self.alpha)

    def update(self, leaves: np.ndarray, priority: np.ndarray) -> None:
        """Change leaves after a look at them; those that are 0 stay 0, and of equal ones the last wins."""
        if self.alpha == 0 or not len(leaves):
            return
        values, most, clamped = clamp_priorities(priority)
        self._note(most, clamped)
        newest = dict(zip(leaves.tolist(), (values ** self.alpha).tolist(), strict=True))
        at = self._there(np.array(list(newest), np.int64))
        new = self._there(np.array(list(newest.values())))
        self.leaves[at] = torch.where(self.leaves[at] > 0, new, 0.0)

    @torch.no_grad()
    def update_async(self, at: torch.Tensor, priority: torch.Tensor, sound: torch.Tensor) -> None:
        """`update` without leaving the device, unless `sound` is false; at [B], priority [B]."""
        if self.alpha == 0:
            return
        given = priority.double()
        kept = given.nan_to_num(MIN_PRIORITY).clamp(MIN_PRIORITY, MAX_PRIORITY)
        absurd = kept != given
        torch.maximum(self.largest, torch.where(absurd, 0.0, kept).max() * sound, out=self.largest)
        self.clamped += (absurd & sound).sum()
        self.leaves[at] = torch.where(sound, kept ** self.alpha, self.leaves[at])  # what was drawn is not 0

    @torch.no_grad()
    def draw(self, n: int, rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Leaves int64 [n], one from each of n equal shares of the total, ascending; importance weights float32 [n],
        the largest 1; and the smallest leaf among them, or the total if all are equal."""
        torch.cumsum(self.leaves, 0, out=self._sums)
        total = self._sums[-1]
        points = torch.rand(n, generator=rng, device=self.device, dtype=torch.float64)
        if len(self._strata) != n:
            self._strata = torch.arange(n, device=self.device, dtype=torch.float64)
        points.add_(self._strata).mul_(total * (BELOW_ONE / n))
        at = torch.searchsorted(self._sums, points, right=True)
        if self.alpha == 0:
            return at, torch.ones(n, device=self.device), total
        values = self.leaves.index_select(0, at)
        least = values.min()
        return at, (least / values).float().pow_(self.beta), least

    def get(self, leaves: np.ndarray) -> np.ndarray:
        found: np.ndarray = self.leaves[self._there(np.asarray(leaves))].cpu().numpy()
        return found

    def set(self, leaves: np.ndarray, values: np.ndarray) -> None:
        """Write consecutive leaves."""
        self.leaves[int(leaves[0]):int(leaves[-1]) + 1].copy_(self._there(values), non_blocking=True)

    def fill(self, values: np.ndarray) -> None:
        self.leaves.copy_(torch.from_numpy(values))

    def total(self) -> float:
        return float(self.leaves.sum())

    def share(self, least: torch.Tensor) -> float:
        """What a leaf is of the total, as it was at the last draw."""
        return float(least / self._sums[-1])

    def state_dict(self) -> dict[str, Any]:
        return {"largest": float(self.largest), "clamped": int(self.clamped)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.largest.fill_(float(state["largest"]))
        self.clamped.fill_(int(state["clamped"]))

    def _note(self, most: float, clamped: int) -> None:
        self.largest.clamp_(min=most)
        if clamped:
            self.clamped += clamped

    def _there(self, values: np.ndarray) -> torch.Tensor:
        """On the device; from pinned memory, so that nobody waits for what the GPU does now."""
        values_t = torch.from_numpy(values)
        return values_t.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else values_t
