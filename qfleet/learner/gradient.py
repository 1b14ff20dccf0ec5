"""Gradient of a batch by autograd."""

from __future__ import annotations

import torch
from torch import nn

from qfleet.core.agent import Agent
from qfleet.core.gradient import GradientResult
from qfleet.core.replay import Sample


class Autograd:
    """Weights and averages the loss, (weight · per_item).mean() + extra, and computes its gradient.

    No other code weights or averages losses. Items with a loss above `bound`, if set, get weight 0.
    """

    def __init__(self, agent: Agent, net: nn.Module, target: nn.Module, rng: torch.Generator,
                 bound: torch.Tensor | None = None) -> None:
        self.agent, self.net, self.target, self.rng = agent, net, target, rng
        parameters = list(net.parameters())
        self.trained = [i for i, parameter in enumerate(parameters) if parameter.requires_grad]
        self.parameters = parameters
        self.bound = bound

    def __call__(self, sample: Sample) -> GradientResult:
        loss = self.agent.loss(self.net, self.target, sample, self.rng)
        per_item = loss.per_item.detach()
        weight = sample.weight if self.bound is None else sample.weight * (per_item <= self.bound)
        total = (weight * loss.per_item).mean()
        if loss.extra is not None:
            total = total + loss.extra
        found = torch.autograd.grad(total, [self.parameters[i] for i in self.trained], allow_unused=True)
        grads: list[torch.Tensor | None] = [None] * len(self.parameters)
        for i, grad in zip(self.trained, found, strict=True):
            grads[i] = grad
        return GradientResult(total.detach(), per_item, grads, loss.priority, dict(loss.metrics), dict(loss.buffers))
