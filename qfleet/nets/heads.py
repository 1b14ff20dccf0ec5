"""Dense layers from features to action values. Shapes: B items, A actions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from qfleet.nets.norms import Norm, dense_norm


def dense(features: int, hidden: Sequence[int], norm: Norm) -> nn.Sequential:
    """Linear layers with ReLU; an empty `hidden` is the identity."""
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [nn.Linear(features, width), *dense_norm(norm, width), nn.ReLU()]
        features = width
    return nn.Sequential(*layers)


class Output(nn.Linear):
    """A linear layer that adds up in float32, whatever its weights are kept in.

    In bfloat16 two values near 10 differ by 0.06 or not at all, which hides which action is better.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.float(), self.weight.float(), self.bias.float())


class Head(nn.Module):
    """[B, features] -> q [B, A] in float32: all hidden layers, then one linear layer."""

    def __init__(self, features: int, hidden: Sequence[int], actions: int, norm: Norm) -> None:
        super().__init__()
        self.hidden = dense(features, hidden, norm)
        self.q = Output(hidden[-1] if hidden else features, actions)

    @property
    def dtype(self) -> torch.dtype:
        return self.q.weight.dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q: torch.Tensor = self.q(self.hidden(x))
        return q


class DuelingHead(nn.Module):
    """[B, features] -> q [B, A] = v + (a − mean a), the mean taken per item (Wang et al. 2016).

    The last hidden layer is split: value and advantage each have one of that width.
    """

    def __init__(self, features: int, hidden: Sequence[int], actions: int, norm: Norm) -> None:
        super().__init__()
        shared, own = hidden[:-1], hidden[-1:]
        self.hidden = dense(features, shared, norm)
        width = shared[-1] if shared else features
        self.value = Head(width, own, 1, norm)
        self.advantage = Head(width, own, actions, norm)

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.hidden(x)
        advantage = self.advantage(x)
        q: torch.Tensor = self.value(x) + advantage - advantage.mean(1, keepdim=True)
        return q
