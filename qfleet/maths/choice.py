"""Choosing actions by their values. Shapes: N lanes, A actions."""

from __future__ import annotations

import torch


def epsilon_greedy(q_NA: torch.Tensor, epsilon_N: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    """The greedy action, or with probability ε any action, lane by lane."""
    lanes, actions = q_NA.shape
    chance = torch.rand(lanes, generator=rng, device=q_NA.device)
    random = torch.randint(actions, (lanes,), generator=rng, device=q_NA.device)
    return torch.where(chance < epsilon_N, random, q_NA.argmax(1))
