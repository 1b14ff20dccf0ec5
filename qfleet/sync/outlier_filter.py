"""Outlier filter of a learner: drops items with exceptionally large losses (Nair et al. 2015)."""

from __future__ import annotations

import torch

from qfleet.maths.outliers import WARMUP, LossStatistics, inlier_mask


class OutlierFilter:
    """Drops items whose loss exceeds the running mean by `deviations` standard deviations.

    `Autograd` reads the limit from `bound`; `update` changes it after every batch.
    """

    def __init__(self, deviations: float, device: torch.device) -> None:
        self.deviations = deviations
        self.statistics = LossStatistics()
        self.bound = torch.full((), torch.inf, device=device)

    def update(self, loss_B: torch.Tensor) -> int:
        """Add the losses of a batch to the statistics; returns the number of outliers among them."""
        keep, self.statistics = inlier_mask(loss_B.float(), self.statistics, self.deviations)
        if self.statistics.batches >= WARMUP:
            self.bound.fill_(self.statistics.mean + self.deviations * self.statistics.variance**0.5)
        return int((~keep).sum())
