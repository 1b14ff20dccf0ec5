"""Loss outliers: losses above the running mean by more than k standard deviations (Nair et al. 2015)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

WARMUP = 10
"""Batches before the first loss can be an outlier."""

MAX_LIMIT_FACTOR = 1.5
"""Outliers enter the statistics as at most this multiple of the limit."""


class LossStatistics(NamedTuple):
    """Running mean and variance of the losses, and the number of batches."""

    mean: float = 0.0
    variance: float = 0.0
    batches: int = 0


def inlier_mask(loss_B: torch.Tensor, statistics: LossStatistics, k: float, momentum: float = 0.1,
                warmup: int = WARMUP) -> tuple[torch.Tensor, LossStatistics]:
    """Inlier mask [B] of the losses, and the statistics updated with all of them.

    There are no outliers in the first `warmup` batches. Non-finite losses are never inliers and do
    not enter the statistics. Other outliers do, or an agent that expects no reward would reject
    every reward: the variance grows with a recurring loss until it is an inlier, if it occurs more
    often than about once in k² + 1 losses. Outliers are clipped to MAX_LIMIT_FACTOR times the
    limit, so that a single huge loss in a batch of 32 widens the range by about a tenth; if all
    losses were zero before, they are not clipped.
    """
    finite = torch.isfinite(loss_B)
    limit = statistics.mean + k * statistics.variance**0.5
    active = statistics.batches >= warmup
    keep = finite & (loss_B <= limit) if active else finite
    seen = loss_B[finite].double().clamp(max=MAX_LIMIT_FACTOR * limit if active and limit > 0 else math.inf)
    if not len(seen):
        return keep, statistics
    mean, variance = float(seen.mean()), float(seen.var(unbiased=False))
    if statistics.batches == 0:
        return keep, LossStatistics(mean, variance, 1)
    step = mean - statistics.mean
    new_variance = (1 - momentum) * (statistics.variance + momentum * step**2) + momentum * variance
    return keep, LossStatistics(statistics.mean + momentum * step, new_variance, statistics.batches + 1)
