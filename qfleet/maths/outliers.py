"""Which losses are beyond belief: those above the running mean by more than k running deviations (Nair et al. 2015)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

WARMUP = 10
"""Batches in which nothing is doubted."""

MAX_LIMIT_FACTOR = 1.5
"""How many times the limit a loss counts at most, where the spread is concerned."""


class LossStatistics(NamedTuple):
    """Running mean and variance of the losses that were seen; of so many batches."""

    mean: float = 0.0
    variance: float = 0.0
    batches: int = 0


def inlier_mask(loss_B: torch.Tensor, spread: LossStatistics, k: float, momentum: float = 0.1,
                warmup: int = WARMUP) -> tuple[torch.Tensor, LossStatistics]:
    """Whether to believe each loss [B], and the spread with all of them in it.

    Nothing is doubted in the first `warmup` batches; what is not finite is never believed, and not counted. Whatever
    else is doubted counts, too, or an agent that expects nothing would never believe in a reward: the spread grows
    with what recurs until that is within it, if it is more than one loss in about k² + 1. It counts as no more than
    MOST times the limit, so that one monster widens the spread of a batch of 32 by about a tenth; but if all losses
    were zero before, it counts whole.
    """
    finite, limit = torch.isfinite(loss_B), spread.mean + k * spread.variance**0.5
    doubts = spread.batches >= warmup
    keep = finite & (loss_B <= limit) if doubts else finite
    seen = loss_B[finite].double().clamp(max=MAX_LIMIT_FACTOR * limit if doubts and limit > 0 else math.inf)
    if not len(seen):
        return keep, spread
    mean, variance = float(seen.mean()), float(seen.var(unbiased=False))
    if spread.batches == 0:
        return keep, LossStatistics(mean, variance, 1)
    step = mean - spread.mean
    wider = (1 - momentum) * (spread.variance + momentum * step**2) + momentum * variance
    return keep, LossStatistics(spread.mean + momentum * step, wider, spread.batches + 1)
