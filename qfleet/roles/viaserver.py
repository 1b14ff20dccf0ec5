"""The gradient rule of a learner whose weights live at a parameter server: push the gradient, pull the weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from qfleet.roles.flat import Flat
from qfleet.roles.gradients import Grads, norm_of
from qfleet.roles.optimizer import slices
from qfleet.roles.server import Push, ServerConfig, Shelf
from qfleet.types import Metrics


class ViaServer:
    """Implements `Gradients`. Alone at its server, and pulling after every push, it is `Solo`, bit by bit.

    `updates` counts what all learners together have applied, as far as is known here.
    """

    def __init__(self, worker: str, shelves: Sequence[Shelf], cfg: ServerConfig, metrics: Metrics) -> None:
        self.worker, self.shelves, self.cfg, self.metrics = worker, shelves, cfg, metrics
        self._sequence = self._since_push = self._since_pull = 0

    def attach(self, flat: Flat) -> None:
        """The server's weights are the truth: they replace those of the network."""
        self.flat, self.cuts = flat, slices(len(flat.master), len(self.shelves))
        self._sum = torch.zeros_like(flat.master)
        self.versions = [0] * len(self.shelves)
        self._pull()

    @property
    def updates(self) -> int:
        return min(self.versions)

    def vote(self, peak: float | None) -> float | None:
        """Nobody waits for anybody."""
        return None if peak is None else 1.0

    def apply(self, grads: Grads | None) -> float:
        if grads is None:
            return math.nan
        gradient = self.flat.gather(grads)
        norm = norm_of(gradient)
        if not math.isfinite(norm):
            return norm
        self._since_push += 1
        self._since_pull += 1
        if self.cfg.push_period_updates > 1:
            self._sum += gradient
            if self._since_push == self.cfg.push_period_updates:
                mean = self._sum / self._since_push
                self._push(mean, norm_of(mean))
                self._sum.zero_()
        else:
            self._push(gradient, norm)
        if self._since_pull >= self.cfg.pull_period_updates:
            self._pull()
        return norm

    def _push(self, gradient: torch.Tensor, norm: float) -> None:
        self._since_push = 0
        self._sequence += 1
        wire = gradient.bfloat16() if self.cfg.compress == "bf16" else gradient
        answers = [shelf.push(Push(self.worker, self._sequence, version, norm, wire[cut]))
                   for shelf, cut, version in zip(self.shelves, self.cuts, self.versions, strict=True)]
        self.metrics.write({"server/staleness": sum(answer.staleness for answer in answers) / len(answers)})
        if stale := sum(answer.verdict == "stale" for answer in answers):
            self.metrics.count("server/stale_pushes", stale)

    def _pull(self) -> None:
        self._since_pull = 0
        for index, (shelf, cut) in enumerate(zip(self.shelves, self.cuts, strict=True)):
            shown = shelf.pull(self.worker)
            self.flat.master[cut] = shown.weights
            self.versions[index] = shown.version
        self.flat.sync()

    def state_dict(self) -> dict[str, Any]:
        return {"sequence": self._sequence}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Whatever the network was given, the server's weights are newer."""
        self._sequence = state["sequence"]
        self._pull()
