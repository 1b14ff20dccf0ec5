"""Losses of distributional reinforcement learning, unreduced.

Shapes: B items, Z atoms of a support, M atoms of any distribution, N predicted and M target
quantiles.
"""

from __future__ import annotations

import math

import torch


def categorical_projection(values: torch.Tensor, probs: torch.Tensor, support: torch.Tensor) -> torch.Tensor:
    """Project the distribution with mass `probs` [B, M] at `values` [B, M] onto `support` [Z]: [B, Z].

    Each mass is split between its two neighbours on the support in proportion to proximity; mass
    outside goes to the nearest end (Bellemare et al. 2017, eq. 7). The support must be increasing,
    with any spacing; values are the caller's, so discounts may differ between items. The mean is
    preserved if no value lies outside.

        support     0     1        3          mass 1 at 1.5  ->  0, 0.75, 0.25
    """
    if values.shape != probs.shape or values.ndim != 2 or support.ndim != 1 or len(support) < 2:
        raise ValueError(f"values and probs must be [B, M] alike and the support [Z], not {tuple(values.shape)}, "
                         f"{tuple(probs.shape)}, {tuple(support.shape)}")
    gaps = support.diff()
    # The ends have one neighbour; clamping leaves no mass on the other side, so any gap works there.
    below, above = torch.cat([gaps[:1], gaps])[:, None], torch.cat([gaps, gaps[-1:]])[:, None]
    clamped = torch.minimum(torch.maximum(values, support[0]), support[-1])
    offset_BZM = clamped[:, None, :] - support[:, None]
    share_BZM = (1 - torch.where(offset_BZM >= 0, offset_BZM / above, -offset_BZM / below)).clamp(min=0)
    return (share_BZM * probs[:, None, :]).sum(2)


def cross_entropy(logits: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """−Σ m log p [B] of the prediction p = softmax(logits) [B, Z] and the target m [B, Z]."""
    if logits.shape != probs.shape or logits.ndim != 2:
        raise ValueError(f"logits and probs must be [B, Z] alike, not {tuple(logits.shape)} and {tuple(probs.shape)}")
    return -(probs * logits.log_softmax(1)).sum(1)


def entropy(probs: torch.Tensor) -> torch.Tensor:
    """−Σ m log m [B]; cross-entropy minus this is the divergence KL(m ‖ p)."""
    return -torch.xlogy(probs, probs).sum(1)


def gaussian_histogram(mean: torch.Tensor, edges: torch.Tensor, sigma: float) -> torch.Tensor:
    """Probability [B, Z] of each bin under a Gaussian around `mean` [B], truncated to all bins (HL-Gauss).

    Bin i lies between `edges[i]` and `edges[i + 1]` ([Z + 1], increasing). A mean outside is clipped to the nearest
    end. A sigma far below the width of a bin gives nearly one-hot probabilities (Farebrother et al. 2024).

        edges       0     1     2     3        mean 1.5, sigma 0.5  ->  0.158, 0.685, 0.158
    """
    if mean.ndim != 1 or edges.ndim != 1 or len(edges) < 2:
        raise ValueError(f"means must be [B] and edges [Z + 1], not {tuple(mean.shape)} and {tuple(edges.shape)}")
    clipped = torch.minimum(torch.maximum(mean, edges[0]), edges[-1])
    doubled_cdf = torch.erf((edges - clipped[:, None]) / (math.sqrt(2) * sigma))
    return doubled_cdf.diff(dim=1) / (doubled_cdf[:, -1:] - doubled_cdf[:, :1])


def midpoints(n: int, device: torch.device | None = None) -> torch.Tensor:
    """τ̂_i = (2i − 1) / 2n [n]: the levels at which n quantiles best represent a distribution (Dabney et al. 2018a)."""
    return (torch.arange(n, device=device) + 0.5) / n


def quantile_huber(theta: torch.Tensor, tau: torch.Tensor, y: torch.Tensor, kappa: float) -> torch.Tensor:
    """Quantile Huber loss Σ_i E_j |τ_i − 1{δ_ij < 0}| L_κ(δ_ij) / κ [B], with δ_ij = y_j − θ_i.

    theta [B, N] at the levels tau [N] or [B, N]; y [B, M]. L_κ is the Huber loss; κ = 0 gives the
    plain quantile loss.
    """
    if tau.shape not in (theta.shape, theta.shape[1:]):
        raise ValueError(f"levels must be [N] or [B, N] for quantiles [B, N], not {tuple(tau.shape)} for "
                         f"{tuple(theta.shape)}")
    delta_BNM = pairwise_td_errors(theta, y)
    size = delta_BNM.abs()
    if kappa > 0:
        size = torch.where(size <= kappa, 0.5 * delta_BNM.square() / kappa, size - 0.5 * kappa)
    asymmetry = (tau.unsqueeze(-1) - (delta_BNM.detach() < 0).to(tau.dtype)).abs()
    return (asymmetry * size).mean(2).sum(1)


def pairwise_td_errors(theta: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """δ_ij = y_j − θ_i, [B, N, M]."""
    if theta.ndim != 2 or y.ndim != 2 or len(theta) != len(y):
        raise ValueError(f"quantiles must be [B, N] and [B, M], not {tuple(theta.shape)} and {tuple(y.shape)}")
    return y[:, None, :] - theta[:, :, None]


def cosine_features(tau: torch.Tensor, n: int) -> torch.Tensor:
    """cos(π i τ) [..., n], i = 0 ... n − 1, of levels τ [...]: the quantile embedding of IQN."""
    return torch.cos(math.pi * torch.arange(n, device=tau.device, dtype=tau.dtype) * tau.unsqueeze(-1))
