"""Loss and backward pass as a CUDA graph, for updates that cannot be captured as a whole.

    sample ─ copied to static tensors ─▶ │ loss ─ backward │ ─▶ gradient ─ sync ─ step ─ priorities
                                           one CUDA graph

`GraphUpdate` is faster, but gradients synchronised with other learners and batches from host memory
need the host between two steps.
"""

from __future__ import annotations

import logging

import torch

from qfleet.accel.cuda_graph import WARM_UP, capture_graph, fast_math, on_side_stream
from qfleet.core.gradient import GradientResult, NetworkGradient
from qfleet.core.replay import Sample
from qfleet.core.tracebacks import first_line

log = logging.getLogger(__name__)


class GraphGradient:
    """A gradient function captured as a CUDA graph after a few eager calls.

    Results are valid until the next call. Batches of another size are computed eagerly.
    """

    def __init__(self, autograd: NetworkGradient) -> None:
        self.autograd = autograd
        self._warm_ups_left = WARM_UP
        self._graph: torch.cuda.CUDAGraph | None = None
        self._batch: Sample | None = None  # static input of the graph
        self._result: GradientResult | None = None  # static output of the graph

    @property
    def captured(self) -> bool:
        return self._graph is not None

    def __call__(self, sample: Sample) -> GradientResult:
        batch = self._batch
        if self._graph is None or self._result is None or batch is None:
            return self._prepare(sample)
        if len(sample.weight) != len(batch.weight):
            return self.autograd(sample)
        torch._foreach_copy_([batch.weight, *batch.rows.values()],
                             [sample.weight, *(sample.rows[name] for name in batch.rows)])
        self._graph.replay()
        return self._result

    def _prepare(self, sample: Sample) -> GradientResult:
        if self._warm_ups_left < 0:  # capture failed
            return self.autograd(sample)
        with fast_math(next(iter(self.autograd.net.parameters())).dtype == torch.bfloat16):
            return self._warm_up(sample) if self._warm_ups_left else self._capture(sample)

    def _warm_up(self, sample: Sample) -> GradientResult:
        """One of the first calls, in which libraries initialise."""
        results: list[GradientResult] = []
        on_side_stream(lambda: results.append(self.autograd(sample)))
        self._warm_ups_left -= 1
        return results[0]

    def _capture(self, sample: Sample) -> GradientResult:
        self._warm_ups_left -= 1
        batch = Sample(sample.keys, sample.weight.clone(), {name: rows.clone() for name, rows in sample.rows.items()})

        def compute() -> None:
            self._result = self.autograd(batch)

        try:
            self._graph = capture_graph(compute, [self.autograd.rng])
            self._graph.replay()
            assert self._result is not None
            self._batch = batch
            log.info("learner.capture: loss and gradient are recorded as a CUDA graph")
            return self._result
        except RuntimeError as error:
            log.warning("learner.capture: this agent's loss cannot be recorded as a CUDA graph (%s); it runs operation "
                        "by operation", first_line(error))
            self._graph = None
            return self.autograd(sample)
