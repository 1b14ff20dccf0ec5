"""Value rescaling (Pohlen et al. 2018): h compresses large returns, so that rewards need no clipping.

Neither function subtracts nearly equal numbers. In float32 the usual forms, √(|x| + 1) − 1 and
(√(1 + 4ε(…)) − 1) / 2ε, lose most digits of small values: the inverse has errors of 3e-4, and often
the wrong sign below 1e-4.
"""

from __future__ import annotations

import torch

EPSILON = 1e-3


def h(x: torch.Tensor, eps: float = EPSILON) -> torch.Tensor:
    """h(x) = sign(x)(√(|x| + 1) − 1) + εx, with the difference written as x / (√(|x| + 1) + 1)."""
    return x / ((x.abs() + 1).sqrt() + 1) + eps * x


def h_inverse(x: torch.Tensor, eps: float = EPSILON) -> torch.Tensor:
    """h⁻¹(x) in closed form: sign(x)(t² − 1), t = √(|y| + 1) the positive root of εt² + t − (|x| + 1 + ε).

    The same equation gives (t − 1)(ε(t + 1) + 1) = |x|, so the result is d(|d| + 2) with
    d = sign(x)(t − 1).
    """
    c = x.abs() + (1 + eps)
    t = 2 * c / (1 + (1 + 4 * eps * c).sqrt())
    d = x / (eps * (t + 1) + 1)
    return d * (d.abs() + 2)
