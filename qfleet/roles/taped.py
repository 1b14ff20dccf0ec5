"""From a batch to a gradient on a GPU by a CUDA graph, for updates that cannot be recorded whole.

    sample ─ copied to where the first batch lay ─▶ │ loss ─ backward │ ─▶ gradient ─ met with others' ─ priorities
                                                      one CUDA graph

Whole updates are faster still (`Whole`), but gradients that meet those of other learners, and batches that come out of
main memory, need the host between two steps.
"""

from __future__ import annotations

import logging

import torch

from qfleet.roles.derive import Derivative, Eager
from qfleet.roles.whole import WARM_UP, aside, first_line, recorded, swift
from qfleet.types import Sample

log = logging.getLogger(__name__)


class Taped:
    """As `eager`, which makes the first derivatives; the others are recorded. What is returned holds until the next
    call. A batch of another size is derived as it is."""

    def __init__(self, eager: Eager) -> None:
        self.eager = eager
        self._left = WARM_UP
        self._graph: torch.cuda.CUDAGraph | None = None
        self._given: list[torch.Tensor] = []
        self._found: Derivative | None = None  # where a recording leaves what it found

    @property
    def recorded(self) -> bool:
        return self._graph is not None

    def __call__(self, sample: Sample) -> Derivative:
        given = [sample.weight, *sample.rows.values()]
        if self._graph is not None and self._found is not None and len(sample.weight) == len(self._given[0]):
            torch._foreach_copy_(self._given, given)
            self._graph.replay()
            return self._found
        if self._graph is not None or self._left < 0:
            return self.eager(sample)
        with swift(next(iter(self.eager.net.parameters())).dtype == torch.bfloat16):
            return self._rehearse(sample) if self._left else self._record(sample, given)

    def _rehearse(self, sample: Sample) -> Derivative:
        """One of the first: libraries prepare in it."""
        found = []
        aside(lambda: found.append(self.eager(sample)))
        self._left -= 1
        return found[0]

    def _record(self, sample: Sample, given: list[torch.Tensor]) -> Derivative:
        self._left -= 1
        self._given = [tensor.clone() for tensor in given]
        batch = Sample(sample.keys, self._given[0], dict(zip(sample.rows, self._given[1:], strict=True)))

        def derive() -> None:
            self._found = self.eager(batch)

        try:
            self._graph = recorded(derive, [self.eager.rng])
            self._graph.replay()
            assert self._found is not None
            log.info("learner.capture: loss and gradient are recorded as a CUDA graph")
            return self._found
        except RuntimeError as error:
            log.warning("learner.capture: this agent's loss cannot be recorded as a CUDA graph (%s); it runs operation "
                        "by operation", first_line(error))
            self._graph, self._given = None, []
            return self.eager(sample)
