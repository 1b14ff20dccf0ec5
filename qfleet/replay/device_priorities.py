"""Priorities as one array on a device, sampled by cumulative sum and binary search, without synchronisation.

A sum tree needs one kernel per level; a GPU sums a million leaves in less time than ten kernel launches take.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from qfleet.core.devices import staged_for
from qfleet.replay.priorities import MAX_PRIORITY, MIN_PRIORITY, clamp_priorities

BELOW_ONE = 1 - 2.0**-40
"""Factor that keeps sampled points below the total: a point rounded up to the total would match no leaf."""


class DevicePriorities:
    """`Priorities` on a device: leaves hold priority ** alpha as float64, 0 for starts that must not be sampled."""

    def __init__(self, leaves: int, alpha: float, device: torch.device) -> None:
        self.alpha, self.device = alpha, device
        self.leaves = torch.zeros(leaves, dtype=torch.float64, device=device)
        self.largest = torch.ones((), dtype=torch.float64, device=device)
        self.clamped = torch.zeros((), dtype=torch.int64, device=device)
        self.beta = torch.ones((), device=device)
        self._sums = torch.zeros_like(self.leaves)
        self._strata = torch.zeros(0, device=device)
        self._host_beta = 1.0  # copy of `beta`, to skip writes that change nothing

    @property
    def nbytes(self) -> int:
        return 2 * self.leaves.nbytes

    def set_beta(self, beta: float) -> None:
        """Set the importance-sampling exponent of later draws."""
        if beta != self._host_beta:
            self.beta.fill_(beta)
            self._host_beta = beta

    def write(self, leaves: np.ndarray, priority: np.ndarray | None, valid: np.ndarray) -> None:
        """Set the leaves [S] of a new chunk, which are consecutive; leaves that are not `valid` become 0."""
        target = self.leaves[int(leaves[0]):int(leaves[-1]) + 1]
        if self.alpha > 0 and priority is not None:
            values, largest, clamped = clamp_priorities(np.where(valid, priority, 1.0))
            self._record_range(largest, clamped)
            target.copy_(self._to_device(np.where(valid, values ** self.alpha, 0.0)), non_blocking=True)
            return
        target.copy_(self._to_device(valid.astype(np.float64)), non_blocking=True)
        if self.alpha > 0:
            target.mul_(self.largest ** self.alpha)

    def update(self, leaves: np.ndarray, priority: np.ndarray) -> None:
        """Set new priorities of sampled leaves; leaves that are 0 stay 0, and of duplicates the last one counts."""
        if self.alpha == 0 or not len(leaves):
            return
        values, largest, clamped = clamp_priorities(priority)
        self._record_range(largest, clamped)
        latest = dict(zip(leaves.tolist(), (values ** self.alpha).tolist(), strict=True))
        at = self._to_device(np.array(list(latest), np.int64))
        new = self._to_device(np.array(list(latest.values())))
        self.leaves[at] = torch.where(self.leaves[at] > 0, new, 0.0)

    @torch.no_grad()
    def update_async(self, at: torch.Tensor, priority: torch.Tensor, finite: torch.Tensor) -> None:
        """`update` without synchronisation; at [B], priority [B]. No effect if `finite`, the check of loss and gradient
        as a bool scalar on the device, is false."""
        if self.alpha == 0:
            return
        given = priority.double()
        clamped = given.nan_to_num(MIN_PRIORITY).clamp(MIN_PRIORITY, MAX_PRIORITY)
        out_of_range = clamped != given
        torch.maximum(self.largest, torch.where(out_of_range, 0.0, clamped).max() * finite, out=self.largest)
        self.clamped += (out_of_range & finite).sum()
        self.leaves[at] = torch.where(finite, clamped ** self.alpha, self.leaves[at])  # sampled leaves are not 0

    @torch.no_grad()
    def draw(self, n: int, rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Stratified sample: leaves int64 [n], one from each n-th of the total, ascending.

        Also returns the importance weights, float32 [n], divided by their maximum, and the smallest value among the
        sampled leaves (the total for alpha = 0).
        """
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
        found: np.ndarray = self.leaves[self._to_device(np.asarray(leaves))].cpu().numpy()
        return found

    def set(self, leaves: np.ndarray, values: np.ndarray) -> None:
        """Set consecutive leaves."""
        self.leaves[int(leaves[0]):int(leaves[-1]) + 1].copy_(self._to_device(values), non_blocking=True)

    def fill(self, values: np.ndarray) -> None:
        self.leaves.copy_(torch.from_numpy(values))

    def total(self) -> float:
        return float(self.leaves.sum())

    def probability(self, value: torch.Tensor) -> float:
        """Sampling probability of a leaf with this value at the last draw."""
        return float(value / self._sums[-1])

    def state_dict(self) -> dict[str, Any]:
        return {"largest": float(self.largest), "clamped": int(self.clamped)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.largest.fill_(float(state["largest"]))
        self.clamped.fill_(int(state["clamped"]))

    def _record_range(self, largest: float, clamped: int) -> None:
        """Update the largest priority seen and the count of clamped ones."""
        self.largest.clamp_(min=largest)
        if clamped:
            self.clamped += clamped

    def _to_device(self, values: np.ndarray) -> torch.Tensor:
        """Copy to the device, from pinned memory, so that the host does not wait for the GPU."""
        return staged_for(self.device, torch.from_numpy(values)).to(self.device, non_blocking=True)
