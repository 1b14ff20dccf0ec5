"""The guard that leaves out losses beyond belief (Nair et al. 2015), as part of a learner's update."""

from __future__ import annotations

import torch

from qfleet.maths.outliers import WARMUP, LossStatistics, inlier_mask


class OutlierFilter:
    """`bound` is where losses stop being believed: the loss reads it, and `judge` moves it after every batch."""

    def __init__(self, deviations: float, device: torch.device) -> None:
        self.deviations = deviations
        self.spread = LossStatistics()
        self.bound = torch.full((), torch.inf, device=device)

    def update(self, loss_B: torch.Tensor) -> int:
        """Take note of the losses of a batch; how many of them were not believed."""
        keep, self.spread = inlier_mask(loss_B.float(), self.spread, self.deviations)
        if self.spread.batches >= WARMUP:
            self.bound.fill_(self.spread.mean + self.deviations * self.spread.variance**0.5)
        return int((~keep).sum())
