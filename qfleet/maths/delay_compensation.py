"""Delay compensation (Zheng et al. 2017, "Asynchronous Stochastic Gradient Descent with Delay Compensation").

A worker derives its gradient g at weights w_then; when it arrives the weights are w_now. The first-order term that is
missing, H (w_now − w_then), is estimated with λ g ⊙ g in the place of the Hessian's diagonal.

Where that helps: on one coordinate with curvature h the true gradient now is g + h Δ, with Δ = w_now − w_then. The
plain one is wrong by |h Δ|, the compensated one by |h − λ g²| |Δ|, which is less if and only if 0 < λ g² < 2 h. Near a
minimum g² vanishes, and nothing is corrected; where λ g² exceeds 2 h, or the curvature is negative, it does harm.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

FLOOR = 1e-7
"""Under the root of the adaptive λ, where no gradient has been seen yet."""


class Compensated(NamedTuple):
    """The gradient for the weights of now, and the running mean of g² that the adaptive λ is made of."""

    gradient: torch.Tensor
    square: torch.Tensor


def compensate(g: torch.Tensor, w_now: torch.Tensor, w_then: torch.Tensor, lam: float,
               square: torch.Tensor | None = None, decay: float = 0.95) -> Compensated:
    """g + λ_t g ⊙ g ⊙ (w_now − w_then).

    Constant (DC-ASGD-c): `square` is None, λ_t = λ. Adaptive (DC-ASGD-a): λ_t = λ / √(MeanSquare + ε), where
    MeanSquare ← decay · MeanSquare + (1 − decay) g² begins with `square` (zeros at first). Without delay, or with
    λ = 0, g comes back as it is, bit by bit.
    """
    if square is None:
        return Compensated(torch.addcmul(g, g * g, w_now - w_then, value=lam), torch.zeros(0))
    square = decay * square + (1 - decay) * g * g
    return Compensated(torch.addcmul(g, g * g / (square + FLOOR).sqrt(), w_now - w_then, value=lam), square)
