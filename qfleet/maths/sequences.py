"""Functions for training on sequences. Shapes: B items, T rows, U trained positions."""

from __future__ import annotations

import torch


def real_rows(last_BT: torch.Tensor) -> torch.Tensor:
    """Bool [B, T]: rows of an episode, including its final one; padding around it also has `last` set."""
    before = torch.cat([torch.ones_like(last_BT[:, :1]), last_BT[:, :-1]], 1)
    return ~last_BT | ~before


def previous(values_BT: torch.Tensor, last_BT: torch.Tensor, first_B: torch.Tensor) -> torch.Tensor:
    """Values of the previous row, 0 where it belongs to no episode; `first_B` precedes the first row."""
    shifted = values_BT[:, :-1] * ~last_BT[:, :-1]
    return torch.cat([first_B[:, None].to(values_BT.dtype), shifted], 1)


def mixed_priority(td_abs_BU: torch.Tensor, trained_BU: torch.Tensor, eta: float) -> torch.Tensor:
    """η max |δ| + (1 − η) mean |δ| over the trained positions (Kapturowski et al. 2019)."""
    counted = td_abs_BU * trained_BU
    mean = counted.sum(1) / trained_BU.sum(1).clamp(min=1)
    return eta * counted.amax(1) + (1 - eta) * mean


def masked_mean(values: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """Mean of the values where `where` is true, 0 if there are none."""
    return (values * where).sum() / where.sum().clamp(min=1)


def drift(q_BA: torch.Tensor, true_BA: torch.Tensor, scale_B: torch.Tensor) -> torch.Tensor:
    """ΔQ [B] = ‖q(ĥ) − q(h)‖₂ / |max q(ĥ)|: error due to the replayed recurrent state (R2D2)."""
    return (true_BA - q_BA).square().sum(1).sqrt() / scale_B.abs().clamp(min=1e-6)
