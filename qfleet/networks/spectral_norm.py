"""Convolutions with spectral norm 1 (Miyato et al. 2018): the largest singular value of the weight is 1."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

FIRST_ITERATIONS = 15
"""Power iterations at construction; afterwards one per pass suffices, since weights change slowly."""


class SpectralConv2d(nn.Conv2d):
    """Convolution with W / σ(W), where W is the flattened kernel [out, in · k · k].

    `u`, the estimate of the left singular vector, is a buffer: it is saved and published with the weights, updated in
    training mode only and constant while acting.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.u: torch.Tensor
        self.register_buffer("u", F.normalize(torch.randn(self.out_channels), dim=0))
        with torch.no_grad():
            for _ in range(FIRST_ITERATIONS):
                self.u.copy_(self._pair(self.weight.flatten(1))[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = self.weight.float().flatten(1)
        with torch.no_grad():
            u, v = self._pair(flat)
            if self.training:
                self.u.copy_(u)
        sigma = torch.dot(u, flat @ v)
        return self._conv_forward(x, (self.weight.float() / sigma).to(x.dtype), self.bias)

    def _pair(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One power iteration: improved singular vectors u [out] and v [in · k · k]."""
        v = F.normalize(flat.t() @ self.u, dim=0)
        return F.normalize(flat @ v, dim=0), v
