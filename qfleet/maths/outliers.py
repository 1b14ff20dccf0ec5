"""Which losses are beyond belief: those above the running mean by more than k running deviations (Nair et al. 2015)."""

from __future__ import annotations

from typing import NamedTuple

import torch

WARMUP = 10
"""Batches in which nothing is doubted."""


class Spread(NamedTuple):
    """Running mean and variance of the losses that were believed; of so many batches."""

    mean: float = 0.0
    variance: float = 0.0
    batches: int = 0


def believed(loss_B: torch.Tensor, spread: Spread, k: float, momentum: float = 0.1,
             warmup: int = WARMUP) -> tuple[torch.Tensor, Spread]:
    """Whether to believe each loss [B], and the spread with the believed ones in it.

    Nothing is doubted in the first `warmup` batches; what is not finite is never believed.
    """
    finite = torch.isfinite(loss_B)
    keep = finite & (loss_B <= spread.mean + k * spread.variance**0.5) if spread.batches >= warmup else finite
    kept = loss_B[keep].double()
    if not len(kept):
        return keep, spread
    mean, variance = float(kept.mean()), float(kept.var(unbiased=False))
    if spread.batches == 0:
        return keep, Spread(mean, variance, 1)
    step = mean - spread.mean
    wider = (1 - momentum) * (spread.variance + momentum * step**2) + momentum * variance
    return keep, Spread(spread.mean + momentum * step, wider, spread.batches + 1)
