"""Gradients that leave early: a part of the vector is sent as soon as backward has found it, while the rest is at work.

Backward finds the gradients of the last layers first, so parts are filled from the end of the vector; they are sent in
that order on every rank, whatever arrives when. The part with the first parameters waits for the loss to be looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch

from qfleet.learner.flat_params import Flat
from qfleet.sync.gradient_sync import Grads

PART = 1 << 18
"""Numbers of a part, at least: smaller messages cost more than they gain."""


class OverlappedAllReduce:
    """Listens to the backward of `flat`'s network. `finish` once per update gives the gradient as all ranks have it."""

    def __init__(
        self, flat: Flat, start_allreduce: Callable[[torch.Tensor], Callable[[], None]], least: int = PART
    ) -> None:
        self.flat, self.start_allreduce = flat, start_allreduce
        self.buckets = _make_buckets([room.numel() for room in flat.grad_views], least)
        self.bucket_of = {index: at for at, (members, _) in enumerate(self.buckets) for index in members}
        self._reset()
        for index, parameter in enumerate(flat.parameters):
            if parameter.requires_grad:
                parameter.register_hook(partial(self._arrived, index))

    def finish(self, grads: Grads | None) -> torch.Tensor:
        """Send what has not been sent, and wait for all. None: the loss was not finite, which everybody must hear."""
        while self._sent < len(self.buckets):
            for index in self.buckets[self._sent][0]:
                grad = None if grads is None else grads[index]
                room = self.flat.grad_views[index]
                room.fill_(math.nan if grads is None else 0.0) if grad is None else room.copy_(grad)
            self._send()
        for wait in self._waits:
            wait()
        self._reset()
        return self.flat.grad

    def _reset(self) -> None:
        self._missing = [set(members) for members, _ in self.buckets]
        self._waits: list[Callable[[], None]] = []
        self._sent = 0

    def _arrived(self, index: int, grad: torch.Tensor) -> None:
        missing = self._missing[self.bucket_of[index]]
        if index not in missing:
            raise RuntimeError("a gradient came twice in one update: this agent cannot use allreduce.overlap")
        self.flat.grad_views[index].copy_(grad)
        missing.discard(index)
        while self._sent < len(self.buckets) - 1 and not self._missing[self._sent]:
            self._send()

    def _send(self) -> None:
        self._waits.append(self.start_allreduce(self.flat.grad[self.buckets[self._sent][1]]))
        self._sent += 1


def _make_buckets(sizes: list[int], least: int) -> list[tuple[list[int], slice]]:
    """Neighbouring parameters in parts of at least so many numbers, from the end: their indices, and their slice."""
    parts: list[tuple[list[int], slice]] = []
    members: list[int] = []
    begin = end = sum(sizes)
    for index in reversed(range(len(sizes))):
        members.append(index)
        begin -= sizes[index]
        if end - begin >= least or index == 0:
            parts.append((members, slice(begin, end)))
            members, end = [], begin
    return parts
