"""Building blocks of Q-learning losses, unreduced: values, errors, and returns along windows of rows.

Shapes: B items, A actions, T rows, U = T - n trained positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

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


class NStep(NamedTuple):
    """n-step returns `ret` [B, U], and `discount` [B, U] of the value at `row` [B, U], the bootstrap row."""

    ret: torch.Tensor
    discount: torch.Tensor
    row: torch.Tensor


def n_step(
    reward: torch.Tensor, discount: torch.Tensor, last: torch.Tensor, gamma: float | torch.Tensor, n: int
) -> NStep:
    """n-step returns from every position, cut short at the final row of an episode.

    Timeline of a truncated episode, n = 3, from row 0:

        row       0    1    2*        (* last: the final observation)
        reward    r0   r1   -
        return    r0 + γ d0 r1,  bootstrapped from row 2 with γ² d0 d1

    γ is a scalar or one value per item, [B, 1]. Termination is `discount = 0`, which multiplies
    later rewards and the bootstrap by zero. A window that begins at a final row has return 0 and
    bootstraps from itself; replay never starts one there.
    """
    if reward.shape != discount.shape or reward.shape != last.shape or reward.ndim != 2:
        raise ValueError(f"rows must be [B, T] alike, not {reward.shape}, {discount.shape}, {last.shape}")
    positions = reward.shape[1] - n
    if n < 1 or positions < 1:
        raise ValueError(f"{reward.shape[1]} rows hold no {n}-step window")
    continues, step = ~last, gamma * discount
    alive = continues[:, :positions]
    ret = reward[:, :positions] * alive
    scale = torch.where(alive, step[:, :positions], 1.0)
    row = torch.arange(positions, device=last.device) + alive
    for k in range(1, n):
        rows = slice(k, k + positions)
        alive = alive & continues[:, rows]
        ret = torch.addcmul(ret, scale, reward[:, rows] * alive)
        scale = torch.where(alive, scale * step[:, rows], scale)
        row = row + alive
    return NStep(ret, scale, row)


def retrace(q_BTA: torch.Tensor, pi_BT: torch.Tensor, rows: Mapping[str, torch.Tensor], gamma: torch.Tensor,
            lam: float, epsilon: float = 0.0) -> torch.Tensor:
    """Retrace(λ) targets [B, T - 1] (Munos et al. 2016) of an ε-greedy target policy π.

    `q_BTA` are values in units of reward; `pi_BT` is the greedy action of the target policy in each
    row. `rows` hold action, reward, discount and last, and if ε > 0 also `mu`, the probability with
    which the action was taken. Computed backwards from the last row, which only has a value:

        G_t = r_t + γ d_t (E_π Q(x', ·) + c' (G' − Q(x', a'))),   c' = λ min(1, π(a'|x') / μ(a'|x'))

    With ε = 0 the ratio is 1 or 0 for any μ. A final row has a value and no action, so its trace is
    cut.
    """
    action = rows["action"].long()
    value = q_BTA.gather(2, pi_BT.unsqueeze(2)).squeeze(2)
    chosen = q_BTA.gather(2, action.unsqueeze(2)).squeeze(2)
    ratio = (pi_BT == action).to(q_BTA.dtype)
    if epsilon:
        value = torch.lerp(value, q_BTA.mean(2), epsilon)
        ratio = (((1 - epsilon) * ratio + epsilon / q_BTA.shape[2]) / rows["mu"].clamp(min=1e-6)).clamp(max=1)
    trace = lam * ratio * ~rows["last"]
    step = gamma * rows["discount"]
    targets = [rows["reward"][:, -2] + step[:, -2] * value[:, -1]]
    for t in range(q_BTA.shape[1] - 3, -1, -1):
        correction = trace[:, t + 1] * (targets[-1] - chosen[:, t + 1])
        targets.append(rows["reward"][:, t] + step[:, t] * (value[:, t + 1] + correction))
    return torch.stack(targets[::-1], 1)
