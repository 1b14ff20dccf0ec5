"""What Q-learning losses are made of, unreduced. Shapes: B items, A actions."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def pick(q_BA: torch.Tensor, action_B: torch.Tensor) -> torch.Tensor:
    """q(s, a) [B] of the actions taken."""
    return q_BA.gather(1, action_B.long().unsqueeze(1)).squeeze(1)


def huber(q: torch.Tensor, y: torch.Tensor, delta: float = 1.0) -> torch.Tensor:
    """½e² near zero, δ(|e| − ½δ) beyond δ, of e = y − q; one number per item."""
    return F.huber_loss(q, y, reduction="none", delta=delta)


def squared(q: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """(y − q)², one number per item."""
    return F.mse_loss(q, y, reduction="none")
