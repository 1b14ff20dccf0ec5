"""How new something is: the episodic bonus of NGU, its modulator, and the running figures behind both.

Shapes: N lanes, k nearest neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class NoveltyKernel:
    """The constants of Badia et al. 2020a: neighbours, ε, c, cluster distance ξ and greatest similarity s_m."""

    neighbours: int = 10
    epsilon: float = 1e-4
    constant: float = 1e-3
    cluster: float = 0.008
    similarity: float = 8.0


def running_mean(mean: torch.Tensor, count: torch.Tensor, value: torch.Tensor, horizon: int) -> torch.Tensor:
    """The mean with one more value in it; `count` values were there before, none makes the first value the mean.

    It is the plain mean of the first `horizon` values, and follows as slowly afterwards as it did then.
    """
    return mean + (value - mean) * (1.0 / (count + 1)).clamp(min=1 / horizon)


def episodic_bonus(distance_Nk: torch.Tensor, mean_N: torch.Tensor, kernel: NoveltyKernel) -> torch.Tensor:
    """1 / (√ΣK + c) [N], K(d²) = ε / (max(d²/d²_m − ξ, 0) + ε); 0 for what is too similar to what was seen.

    `distance_Nk` are the squared distances to the nearest neighbours, inf where there are fewer; a lane that has seen
    nothing in its episode has nothing to compare with, and gets 0.
    """
    normal = distance_Nk / mean_N.clamp(min=1e-12).unsqueeze(1)
    similarity = kernel.epsilon / ((normal - kernel.cluster).clamp(min=0) + kernel.epsilon)
    s = similarity.sum(1).sqrt() + kernel.constant
    known = torch.isfinite(distance_Nk).any(1)
    return torch.where(known & (s <= kernel.similarity), 1 / s, 0.0)


def modulator(error_N: torch.Tensor, mean: torch.Tensor, deviation: torch.Tensor, most: float) -> torch.Tensor:
    """min(max(1 + (e − μ)/σ, 1), L) [N]: what the whole run has seen little of counts up to L times."""
    return (1 + (error_N - mean) / deviation.clamp(min=1e-8)).clamp(1, most)
