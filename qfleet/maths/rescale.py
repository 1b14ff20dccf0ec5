"""Value rescaling (Pohlen et al. 2018): h squashes returns of any size, so that rewards need no clipping."""

from __future__ import annotations

import torch

EPSILON = 1e-3


def h(x: torch.Tensor, eps: float = EPSILON) -> torch.Tensor:
    """h(x) = sign(x)(√(|x| + 1) − 1) + εx."""
    return x.sign() * ((x.abs() + 1).sqrt() - 1) + eps * x


def h_inverse(x: torch.Tensor, eps: float = EPSILON) -> torch.Tensor:
    """h⁻¹(x), in closed form: the positive root of εt² + t − (|x| + 1 + ε), t = √(|y| + 1)."""
    root = ((1 + 4 * eps * (x.abs() + 1 + eps)).sqrt() - 1) / (2 * eps)
    return x.sign() * (root.square() - 1)
