"""Overlap of allreduce and backward pass: each bucket of the gradient is sent as soon as it is computed.

Backward computes the gradients of the last layers first, so buckets are filled from the end of the
vector. Every rank sends them in that order, whatever the order of arrival. The bucket with the
first parameters is sent only after the loss was checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch

from qfleet.optim.flat_params import Flat
from qfleet.sync.gradient_sync import Grads

MIN_BUCKET_ELEMENTS = 1 << 18
"""Minimum number of elements of a bucket: smaller messages cost more than they gain."""


class OverlappedAllReduce:
    """Hooks into the backward pass of `flat`'s network; `finish`, once per update, returns the summed gradient."""

    def __init__(
        self, flat: Flat, start_allreduce: Callable[[torch.Tensor], Callable[[], None]],
        min_elements: int = MIN_BUCKET_ELEMENTS,
    ) -> None:
        self.flat, self.start_allreduce = flat, start_allreduce
        self.buckets = _make_buckets([view.numel() for view in flat.grad_views], min_elements)
        self.bucket_of = {index: at for at, (members, _) in enumerate(self.buckets) for index in members}
        self._reset()
        for index, parameter in enumerate(flat.parameters):
            if parameter.requires_grad:
                parameter.register_hook(partial(self._on_gradient, index))

    def finish(self, grads: Grads | None) -> torch.Tensor:
        """Send the remaining buckets and wait for all; None (non-finite loss) sends NaN to all ranks."""
        while self._sent < len(self.buckets):
            for index in self.buckets[self._sent][0]:
                grad = None if grads is None else grads[index]
                view = self.flat.grad_views[index]
                view.fill_(math.nan if grads is None else 0.0) if grad is None else view.copy_(grad)
            self._send()
        for wait in self._waits:
            wait()
        self._reset()
        return self.flat.grad

    def _reset(self) -> None:
        self._missing = [set(members) for members, _ in self.buckets]
        self._waits: list[Callable[[], None]] = []
        self._sent = 0

    def _on_gradient(self, index: int, grad: torch.Tensor) -> None:
        missing = self._missing[self.bucket_of[index]]
        if index not in missing:
            raise RuntimeError("a parameter received two gradients in one update: "
                               "this agent cannot use allreduce.overlap")
        self.flat.grad_views[index].copy_(grad)
        missing.discard(index)
        while self._sent < len(self.buckets) - 1 and not self._missing[self._sent]:
            self._send()

    def _send(self) -> None:
        self._waits.append(self.start_allreduce(self.flat.grad[self.buckets[self._sent][1]]))
        self._sent += 1


def _make_buckets(sizes: list[int], min_elements: int) -> list[tuple[list[int], slice]]:
    """Group neighbouring parameters, from the end, into buckets of at least `min_elements` elements.

    Returns the parameter indices and the slice of each bucket.
    """
    buckets: list[tuple[list[int], slice]] = []
    members: list[int] = []
    begin = end = sum(sizes)
    for index in reversed(range(len(sizes))):
        members.append(index)
        begin -= sizes[index]
        if end - begin >= min_elements or index == 0:
            buckets.append((members, slice(begin, end)))
            members, end = [], begin
    return buckets
