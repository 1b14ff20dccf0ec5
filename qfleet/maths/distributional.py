"""Laws of returns instead of their means, unreduced. Shapes: B items, Z atoms of a support, M atoms of any law,
N predicted and M target quantiles."""

from __future__ import annotations

import math

import torch


def categorical_projection(values: torch.Tensor, probs: torch.Tensor, support: torch.Tensor) -> torch.Tensor:
    """The law that has mass `probs` [B, M] at `values` [B, M], moved onto `support` [Z]: probabilities [B, Z].

    Every mass goes to its two neighbours on the support, the more to the nearer one, and what lies outside goes to the
    end (Bellemare et al. 2017, eq. 7). The support may have any distances but must rise; values are the caller's, so
    discounts may differ from item to item. Means are kept as long as nothing lies outside.

        support     0     1        3          mass 1 at 1.5  ->  0, 0.75, 0.25
    """
    if values.shape != probs.shape or values.ndim != 2 or support.ndim != 1 or len(support) < 2:
        raise ValueError(f"values and probs must be [B, M] alike and the support [Z], not {tuple(values.shape)}, "
                         f"{tuple(probs.shape)}, {tuple(support.shape)}")
    gaps = support.diff()
    # The ends have a neighbour on one side only; on the other nothing is left after clamping, so any gap will do.
    below, above = torch.cat([gaps[:1], gaps])[:, None], torch.cat([gaps, gaps[-1:]])[:, None]
    inside = torch.minimum(torch.maximum(values, support[0]), support[-1])
    offset_BZM = inside[:, None, :] - support[:, None]
    share_BZM = (1 - torch.where(offset_BZM >= 0, offset_BZM / above, -offset_BZM / below)).clamp(min=0)
    return (share_BZM * probs[:, None, :]).sum(2)


def cross_entropy(logits: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """−Σ m log p [B] of the prediction p = softmax(logits) [B, Z] and the target m [B, Z]."""
    if logits.shape != probs.shape or logits.ndim != 2:
        raise ValueError(f"logits and probs must be [B, Z] alike, not {tuple(logits.shape)} and {tuple(probs.shape)}")
    return -(probs * logits.log_softmax(1)).sum(1)


def entropy(probs: torch.Tensor) -> torch.Tensor:
    """−Σ m log m [B]; cross-entropy less this is the divergence KL(m ‖ p)."""
    return -torch.xlogy(probs, probs).sum(1)


def midpoints(n: int, device: torch.device | None = None) -> torch.Tensor:
    """τ̂_i = (2i − 1) / 2n [n]: the levels at which n quantiles represent a law best (Dabney et al. 2018a)."""
    return (torch.arange(n, device=device) + 0.5) / n


def quantile_huber(theta: torch.Tensor, tau: torch.Tensor, y: torch.Tensor, kappa: float) -> torch.Tensor:
    """Σ_i E_j |τ_i − 1{δ_ij < 0}| L_κ(δ_ij) / κ  [B], δ_ij = y_j − θ_i: how far `theta` is from the quantiles of `y`.

    theta [B, N] at the levels tau [N] or [B, N]; y [B, M]. L_κ is the Huber loss; κ = 0 is the quantile loss itself.
    """
    if tau.shape not in (theta.shape, theta.shape[1:]):
        raise ValueError(f"levels must be [N] or [B, N] for quantiles [B, N], not {tuple(tau.shape)} for "
                         f"{tuple(theta.shape)}")
    delta_BNM = pairwise_td_errors(theta, y)
    size = delta_BNM.abs()
    if kappa > 0:
        size = torch.where(size <= kappa, 0.5 * delta_BNM.square() / kappa, size - 0.5 * kappa)
    tilt = (tau.unsqueeze(-1) - (delta_BNM.detach() < 0).to(tau.dtype)).abs()
    return (tilt * size).mean(2).sum(1)


def pairwise_td_errors(theta: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """δ_ij = y_j − θ_i, [B, N, M]."""
    if theta.ndim != 2 or y.ndim != 2 or len(theta) != len(y):
        raise ValueError(f"quantiles must be [B, N] and [B, M], not {tuple(theta.shape)} and {tuple(y.shape)}")
    return y[:, None, :] - theta[:, :, None]


def cosine_features(tau: torch.Tensor, n: int) -> torch.Tensor:
    """cos(π i τ) [..., n], i = 0 ... n − 1, of levels τ [...]: how IQN shows a level to a network."""
    return torch.cos(math.pi * torch.arange(n, device=tau.device, dtype=tau.dtype) * tau.unsqueeze(-1))
