"""Delay compensation (Zheng et al. 2017, "Asynchronous Stochastic Gradient Descent with Delay Compensation").

A worker computes its gradient g at weights w_then; when it arrives the weights are w_now. The
missing first-order term, H (w_now − w_then), is estimated with λ g ⊙ g as the diagonal of the
Hessian.

On one coordinate with curvature h, the true gradient is g + h Δ, with Δ = w_now − w_then. The error
of the plain gradient is |h Δ|, that of the compensated one |h − λ g²| |Δ|, which is smaller if and
only if 0 < λ g² < 2 h. Near a minimum g² vanishes and nothing is corrected; where λ g² exceeds 2 h
or the curvature is negative, compensation does harm.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

FLOOR = 1e-7
"""ε under the root of the adaptive λ, for elements without a gradient so far."""


class Compensated(NamedTuple):
    """The compensated gradient, and the running mean of g² for the adaptive λ."""

    gradient: torch.Tensor
    square: torch.Tensor


def compensate(g: torch.Tensor, w_now: torch.Tensor, w_then: torch.Tensor, lam: float,
               square: torch.Tensor | None = None, decay: float = 0.95) -> Compensated:
    """g + λ_t g ⊙ g ⊙ (w_now − w_then).

    Constant (DC-ASGD-c): `square` is None, λ_t = λ. Adaptive (DC-ASGD-a):
    λ_t = λ / √(MeanSquare + ε), where MeanSquare ← decay · MeanSquare + (1 − decay) g² starts from
    `square` (zeros at first). Without delay, or with λ = 0, g is returned unchanged, bit by bit.
    """
    if square is None:
        return Compensated(torch.addcmul(g, g * g, w_now - w_then, value=lam), torch.zeros(0))
    square = decay * square + (1 - decay) * g * g
    return Compensated(torch.addcmul(g, g * g / (square + FLOOR).sqrt(), w_now - w_then, value=lam), square)
