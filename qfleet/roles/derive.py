"""From a batch to a gradient: by autograd as usual, or by a recording of what autograd did.

Small networks spend more time in autograd's and the modules' bookkeeping than in arithmetic. `Captured` records the
operations of one update, forward and backward, and plays them back for every batch of the same shape: the same
operations in the same order, so the same numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from qfleet.agent import Agent
from qfleet.roles.trace import traced
from qfleet.types import Sample

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Derivative:
    """The weighted mean loss, its gradient (one tensor per parameter, None = no part), and what else was found."""

    total: torch.Tensor
    per_item: torch.Tensor
    grads: Sequence[torch.Tensor | None]
    priority: torch.Tensor
    metrics: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


Derive = Callable[[Sample], Derivative]


class Eager:
    """The one place where losses are weighted and averaged: (weight · per_item).mean() + extra.

    With a `bound`, losses above it weigh nothing.
    """

    def __init__(self, agent: Agent, net: nn.Module, target: nn.Module, rng: torch.Generator) -> None:
        self.agent, self.net, self.target, self.rng = agent, net, target, rng
        parameters = list(net.parameters())
        self.trained = [i for i, parameter in enumerate(parameters) if parameter.requires_grad]
        self.parameters = parameters
        self.bound: torch.Tensor | None = None

    def __call__(self, sample: Sample) -> Derivative:
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
        return Derivative(total.detach(), per_item, grads, loss.priority, dict(loss.metrics), dict(loss.buffers))


class Captured:
    """Plays back the first update; falls back to `eager`, saying why, where it cannot be recorded."""

    def __init__(self, eager: Eager) -> None:
        self.eager = eager
        self._play: Derive | None = None
        self._items = 0  # of one replay, batches differ in nothing else

    @property
    def recorded(self) -> bool:
        return self._play is not None and self._play is not self.eager

    def __call__(self, sample: Sample) -> Derivative:
        if self._play is None or len(sample.keys) != self._items:
            first = self._undisturbed(self.eager, sample)
            if not torch.isfinite(first.total):
                return self.eager(sample)  # nothing to learn from this one, nor to compare a recording with
            self._items, self._play = len(sample.keys), self._undisturbed(self._record, sample)
        return self._play(sample)

    def _undisturbed(self, do: Callable[[Sample], Any], sample: Sample) -> Any:
        """Do something that must not count as an update: the generator and all buffers are as before."""
        buffers = [*self.eager.net.buffers(), *self.eager.target.buffers()]
        state, kept = self.eager.rng.get_state(), [buffer.clone() for buffer in buffers]
        try:
            return do(sample)
        finally:
            self.eager.rng.set_state(state)
            for buffer, value in zip(buffers, kept, strict=True):
                buffer.copy_(value)

    def _record(self, sample: Sample) -> Derive:
        names = list(sample.rows)
        tags: list[str] = []
        buffers: list[str] = []

        def update(weight: torch.Tensor, *rows: torch.Tensor) -> list[torch.Tensor | None]:
            found = self.eager(Sample(sample.keys, weight, dict(zip(names, rows, strict=True))))
            tags[:], buffers[:] = found.metrics, found.buffers
            return [found.total, found.per_item, found.priority, *found.metrics.values(), *found.buffers.values(),
                    *found.grads]

        @torch.inference_mode()
        def play(sample: Sample) -> Derivative:
            total, per_item, priority, *rest = forward(sample.weight, *[sample.rows[name] for name in names])
            figures, grads = rest[:len(tags) + len(buffers)], rest[len(tags) + len(buffers):]
            return Derivative(total, per_item, grads, priority, dict(zip(tags, figures, strict=False)),
                              dict(zip(buffers, figures[len(tags):], strict=True)))

        try:
            forward = traced(update, sample.weight, *sample.rows.values())
            if _same(self._undisturbed(self.eager, sample), self._undisturbed(play, sample)):
                return play
            reason = "the recording does not repeat it, as with randomness that is not the given generator's"
        except Exception as error:  # whatever the tracer meets, the update itself is sound
            reason = f"{type(error).__name__}: {error}"
        log.warning("learner.capture: this agent's update cannot be recorded (%s); it runs as it is", reason)
        return self.eager


def _same(one: Derivative, other: Derivative) -> bool:
    pairs = [(one.total, other.total), (one.priority, other.priority), *zip(one.grads, other.grads, strict=True)]
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)
