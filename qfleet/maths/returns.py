"""Returns along windows of rows. Shapes: B items, T rows, U = T - n trained positions."""

from __future__ import annotations

from typing import NamedTuple

import torch


class NStep(NamedTuple):
    """`ret` [B, U]; `discount` [B, U] of the value at `row` [B, U], the row to bootstrap from."""

    ret: torch.Tensor
    discount: torch.Tensor
    row: torch.Tensor


def n_step(
    reward: torch.Tensor, discount: torch.Tensor, last: torch.Tensor, gamma: float | torch.Tensor, n: int
) -> NStep:
    """The n-step return from every position, cut short at the final row of an episode.

    Timeline of a truncated episode, n = 3, from row 0:

        row       0    1    2*        (* last: the final observation)
        reward    r0   r1   -
        return    r0 + γ d0 r1,  bootstrapped from row 2 with γ² d0 d1

    A termination is `discount = 0`: what follows, and the bootstrap, are then multiplied by zero. A window that
    begins at a final row has return 0 and bootstraps from itself; replay never starts one there.
    """
    if reward.shape != discount.shape or reward.shape != last.shape or reward.ndim != 2:
        raise ValueError(f"rows must be [B, T] alike, not {reward.shape}, {discount.shape}, {last.shape}")
    positions = reward.shape[1] - n
    if n < 1 or positions < 1:
        raise ValueError(f"{reward.shape[1]} rows hold no {n}-step window")
    alive = ~last[:, :positions]
    ret = reward[:, :positions] * alive
    scale = torch.where(alive, gamma * discount[:, :positions], 1.0)
    row = torch.arange(positions, device=last.device) + alive
    for k in range(1, n):
        rows = slice(k, k + positions)
        alive = alive & ~last[:, rows]
        ret = ret + scale * reward[:, rows] * alive
        scale = torch.where(alive, scale * gamma * discount[:, rows], scale)
        row = row + alive
    return NStep(ret, scale, row)
