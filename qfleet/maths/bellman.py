"""Building blocks of Q-learning losses, unreduced. Shapes: B items, A actions."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def gather_actions(q: torch.Tensor, action_B: torch.Tensor) -> torch.Tensor:
    """q(s, a) of the actions taken: [B, A] -> [B], or distributions [B, A, ...] -> [B, ...]."""
    index = action_B.long().view(-1, *[1] * (q.ndim - 1)).expand(-1, 1, *q.shape[2:])
    return q.gather(1, index).squeeze(1)


def huber(q: torch.Tensor, y: torch.Tensor, delta: float = 1.0) -> torch.Tensor:
    """Huber loss of e = y − q: ½e² near zero, δ(|e| − ½δ) beyond δ; one value per item."""
    return F.huber_loss(q, y, reduction="none", delta=delta)


def squared(q: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Squared error (y − q)², one value per item."""
    return F.mse_loss(q, y, reduction="none")


def scaled_log_policy(q_BA: torch.Tensor, temperature: float) -> torch.Tensor:
    """τ log π [B, A] of the policy π = softmax(q / τ) (Vieillard et al. 2020); at most 0."""
    return temperature * (q_BA / temperature).log_softmax(1)
