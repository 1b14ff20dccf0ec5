"""From a batch to a gradient on a GPU by a CUDA graph, for updates that cannot be recorded whole.

    sample ─ copied to where the first batch lay ─▶ │ loss ─ backward │ ─▶ gradient ─ met with others' ─ priorities
                                                      one CUDA graph

Whole updates are faster still (`Whole`), but gradients that meet those of other learners, and batches that come out of
main memory, need the host between two steps.
"""

from __future__ import annotations

import logging

import torch

from qfleet.accel.graph_update import WARM_UP, capture_graph, fast_math, first_line, on_side_stream
from qfleet.core.replay import Sample
from qfleet.learner.gradient import Autograd, GradientResult

log = logging.getLogger(__name__)


class GraphGradient:
    """As `eager`, which makes the first derivatives; the others are recorded. What is returned holds until the next
    call. A batch of another size is derived as it is."""

    def __init__(self, eager: Autograd) -> None:
        self.eager = eager
        self._left = WARM_UP
        self._graph: torch.cuda.CUDAGraph | None = None
        self._batch: Sample | None = None  # what a recording derives
        self._found: GradientResult | None = None  # where a recording leaves what it found

    @property
    def captured(self) -> bool:
        return self._graph is not None

    def __call__(self, sample: Sample) -> GradientResult:
        batch = self._batch
        if self._graph is None or self._found is None or batch is None:
            return self._prepare(sample)
        if len(sample.weight) != len(batch.weight):
            return self.eager(sample)
        torch._foreach_copy_([batch.weight, *batch.rows.values()],
                             [sample.weight, *(sample.rows[name] for name in batch.rows)])
        self._graph.replay()
        return self._found

    def _prepare(self, sample: Sample) -> GradientResult:
        if self._left < 0:  # recording has failed
            return self.eager(sample)
        with fast_math(next(iter(self.eager.net.parameters())).dtype == torch.bfloat16):
            return self._warm_up(sample) if self._left else self._record(sample)

    def _warm_up(self, sample: Sample) -> GradientResult:
        """One of the first: libraries prepare in it."""
        found = []
        on_side_stream(lambda: found.append(self.eager(sample)))
        self._left -= 1
        return found[0]

    def _record(self, sample: Sample) -> GradientResult:
        self._left -= 1
        batch = Sample(sample.keys, sample.weight.clone(), {name: rows.clone() for name, rows in sample.rows.items()})

        def derive() -> None:
            self._found = self.eager(batch)

        try:
            self._graph = capture_graph(derive, [self.eager.rng])
            self._graph.replay()
            assert self._found is not None
            self._batch = batch
            log.info("learner.capture: loss and gradient are recorded as a CUDA graph")
            return self._found
        except RuntimeError as error:
            log.warning("learner.capture: this agent's loss cannot be recorded as a CUDA graph (%s); it runs operation "
                        "by operation", first_line(error))
            self._graph = None
            return self.eager(sample)
