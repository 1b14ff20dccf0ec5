"""Noisy linear layers (Fortunato et al. 2018), factorised: y = (μ + σ ⊙ ε_out ε_inᵀ) x + β + σ_β ⊙ ε_out.

A layer stores no noise: every pass draws its own from a generator. No two passes share noise, neither those of online
and target network nor two steps of an actor, and resuming needs only the generator's state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Noise:
    """Noise source of one pass: one draw shared by all items, or with `items` = B one per item."""

    rng: torch.Generator
    items: int = 1

    def draw(self, size: int, x: torch.Tensor) -> torch.Tensor:
        """f(ε) = sgn(ε)√|ε|, shaped [items, (1, ...) size] to broadcast with a tensor of x's rank."""
        epsilon = torch.randn(self.items, size, generator=self.rng, device=self.rng.device)
        scaled = epsilon.sign() * epsilon.abs().sqrt()
        return scaled.to(x.dtype).view(self.items, *[1] * (x.ndim - 2), size)


class NoisyLinear(nn.Module):
    """[B, ..., features] -> [B, ..., size] in the dtype of x; without noise the mean, β + μx.

    The noisy weight is never materialised: ε_out ⊙ (σ (ε_in ⊙ x)) costs one more matrix multiplication and allows
    separate noise per item.
    """

    def __init__(self, features: int, size: int, sigma: float) -> None:
        super().__init__()
        bound = features**-0.5
        self.weight = nn.Parameter(torch.empty(size, features).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(size).uniform_(-bound, bound))
        self.sigma_weight = nn.Parameter(torch.full((size, features), sigma * bound))
        self.sigma_bias = nn.Parameter(torch.full((size,), sigma * bound))

    def forward(self, x: torch.Tensor, noise: Noise | None) -> torch.Tensor:
        mean = F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))
        if noise is None:
            return mean
        size, features = self.weight.shape
        inner, outer = noise.draw(features, x), noise.draw(size, x)
        return mean + outer * F.linear(x * inner, self.sigma_weight.to(x.dtype), self.sigma_bias.to(x.dtype))
