"""Intrinsic reward of NGU: episodic bonus, life-long modulator, and the running means of both.

Shapes: N lanes, k nearest neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class NoveltyKernel:
    """Constants of Badia et al. 2020a: number of neighbours, ε, c, cluster distance ξ and maximum similarity s_m."""

    neighbours: int = 10
    epsilon: float = 1e-4
    constant: float = 1e-3
    cluster: float = 0.008
    similarity: float = 8.0


def running_mean(mean: torch.Tensor, count: torch.Tensor, value: torch.Tensor, horizon: int) -> torch.Tensor:
    """Running mean with one more value; `count` is the number of values so far, 0 makes `value` the mean.

    It is the plain mean of the first `horizon` values, then an exponential one with rate 1 /
    `horizon`.
    """
    return mean + (value - mean) * (1.0 / (count + 1)).clamp(min=1 / horizon)


def episodic_bonus(distance_Nk: torch.Tensor, mean_N: torch.Tensor, kernel: NoveltyKernel) -> torch.Tensor:
    """1 / (√ΣK + c) [N], K(d²) = ε / (max(d²/d²_m − ξ, 0) + ε); 0 if the similarity exceeds s_m.

    `distance_Nk` are the squared distances to the nearest neighbours, inf where there are fewer; a
    lane without memories in this episode gets 0.
    """
    normalised = distance_Nk / mean_N.clamp(min=1e-12).unsqueeze(1)
    similarity = kernel.epsilon / ((normalised - kernel.cluster).clamp(min=0) + kernel.epsilon)
    s = similarity.sum(1).sqrt() + kernel.constant
    known = torch.isfinite(distance_Nk).any(1)
    return torch.where(known & (s <= kernel.similarity), 1 / s, 0.0)


def modulator(error_N: torch.Tensor, mean: torch.Tensor, deviation: torch.Tensor, max_value: float) -> torch.Tensor:
    """min(max(1 + (e − μ)/σ, 1), L) [N]: observations that are novel in the whole run count up to L times."""
    return (1 + (error_N - mean) / deviation.clamp(min=1e-8)).clamp(1, max_value)
