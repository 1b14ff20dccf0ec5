"""What Q-learning losses are made of, unreduced. Shapes: B items, A actions."""

from __future__ import annotations

import torch


def pick(q_BA: torch.Tensor, action_B: torch.Tensor) -> torch.Tensor:
    """q(s, a) [B] of the actions taken."""
    return q_BA.gather(1, action_B.long().unsqueeze(1)).squeeze(1)


def huber(error: torch.Tensor, delta: float = 1.0) -> torch.Tensor:
    """½e² near zero, δ(|e| − ½δ) beyond δ."""
    size = error.abs()
    return torch.where(size <= delta, 0.5 * error.square(), delta * (size - 0.5 * delta))
