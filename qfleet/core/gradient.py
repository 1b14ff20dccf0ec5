"""Gradient of a batch, and the protocol of what computes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from qfleet.core.replay import Sample


@dataclass(frozen=True)
class GradientResult:
    """Weighted mean loss, its gradient (one tensor per parameter, None = unused), and the rest of
    the agent's `Loss`.
    """

    total: torch.Tensor
    per_item: torch.Tensor
    grads: Sequence[torch.Tensor | None]
    priority: torch.Tensor
    metrics: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


GradientFn = Callable[[Sample], GradientResult]


class NetworkGradient(Protocol):
    """A `GradientFn` that tells its network and its source of randomness."""

    @property
    def net(self) -> nn.Module: ...
    @property
    def rng(self) -> torch.Generator: ...
    def __call__(self, sample: Sample) -> GradientResult: ...
