"""A full update (sample, loss, backward, clip, step, priorities) as one CUDA graph.

    sample ─ windows ─ loss ─ gradient ─ norm ─ clip ─ optimizer ─ rounding ─ priorities     one CUDA graph

On a GPU the first updates run eagerly, then one is captured as a CUDA graph, which launches all its
kernels at once. Only a few metrics are read back, one period later, so that host and GPU never wait
for each other. A batch with a non-finite loss or gradient changes nothing, as in eager updates; the
host learns of it one period later.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from qfleet.accel.cuda_graph import WARM_UP, capture_graph, fast_math, on_side_stream
from qfleet.accel.protocols import DeviceOptimizer, FlatParams
from qfleet.core.gradient import NetworkGradient
from qfleet.core.tracebacks import first_line
from qfleet.replay.device_store import DeviceReplay

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class UpdateReport:
    """Results since the last report: newest metrics, number of bad updates, and the longest run of them."""

    metrics: dict[str, float]
    bad: int
    max_bad_in_a_row: int


class GraphUpdate:
    """`update` makes one update, with or without metrics; `report` returns metrics one call late."""

    def __init__(self, replay: DeviceReplay, autograd: NetworkGradient, flat: FlatParams, optimizer: DeviceOptimizer,
                 batch_size: int) -> None:
        self.replay, self.autograd, self.flat, self.batch_size = replay, autograd, flat, batch_size
        self.optimizer = optimizer
        self.device = flat.master.device
        self.tags: list[str] = []
        self._metrics = torch.zeros(0, device=self.device)
        self._bad = torch.zeros(3, device=self.device).unbind()  # total, longest run, current run
        self._made = 0
        self._graphs: tuple[torch.cuda.CUDAGraph, ...] = ()  # without and with metrics
        self._pending_report: tuple[torch.Tensor, torch.Tensor, torch.cuda.Event | None] | None = None
        self._bad_reported = 0

    def claim(self) -> bool:
        """Claim the items of one update from the rate limiter; False if it does not allow the update now."""
        return self.replay.claim(self.batch_size)

    def update(self, with_metrics: bool) -> None:
        self.replay.prepare()
        self.optimizer.prepare()
        if self._graphs:
            self._graphs[with_metrics].replay()
        elif self.device.type != "cuda":
            self.run_eagerly()
        else:
            self._warm_up_or_capture(with_metrics)
        self._made += 1

    def report(self) -> UpdateReport | None:
        """Metrics requested by the previous call, None at the first: the copy to the host is asynchronous."""
        pending, self._pending_report = self._pending_report, self._request_report()
        if pending is None:
            return None
        metrics, bad, ready = pending
        if ready is not None:
            ready.synchronize()
        new, self._bad_reported = int(bad[0]) - self._bad_reported, int(bad[0])
        return UpdateReport(dict(zip(self.tags, metrics.tolist(), strict=True)), new, int(bad[1]))

    def unreported_bad(self) -> int:
        """Number of bad updates not reported yet, which will not be reported again; waits for the device."""
        before, self._bad_reported, self._pending_report = self._bad_reported, int(self._bad[0]), None
        return self._bad_reported - before

    def run_eagerly(self, with_metrics: bool = True) -> None:
        """One update, operation by operation, with or without metrics."""
        index, sample, _ = self.replay.draw(self.batch_size)
        result = self.autograd(sample)
        with torch.no_grad():
            gradient = self.flat.gather(result.grads)
            norm = torch.dot(gradient, gradient).sqrt()
            ok = torch.isfinite(norm) & torch.isfinite(result.total)
            if not self.optimizer.step_if(ok, gradient, norm, self.flat.bf16_target):
                self.flat.copy_to_network()
            self.flat.set_buffers({name: torch.where(ok, value, self.flat.buffer(name))
                                   for name, value in result.buffers.items()})
            self.replay.priorities.update_async(index, result.priority, ok)
            not_ok, (bad, longest, current) = ~ok, self._bad
            bad += not_ok
            current.add_(1).mul_(not_ok)
            torch.maximum(longest, current, out=longest)
            if with_metrics:
                self._store_metrics({"train/loss": result.total, "train/grad_norm": norm,
                                     **{tag: value.mean() for tag, value in result.metrics.items()}})

    def _store_metrics(self, metrics: dict[str, torch.Tensor]) -> None:
        if not self.tags:
            self.tags = list(metrics)
            self._metrics = torch.zeros(len(metrics), device=self.device)
        self._metrics.copy_(torch.stack([value.float() for value in metrics.values()]))

    def _request_report(self) -> tuple[torch.Tensor, torch.Tensor, torch.cuda.Event | None]:
        if self.device.type != "cuda":
            return self._metrics.clone(), torch.stack(self._bad), None
        copies = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
                  for x in (self._metrics, torch.stack(self._bad))]
        ready = torch.cuda.Event()
        ready.record()
        return copies[0], copies[1], ready

    def _warm_up_or_capture(self, with_metrics: bool) -> None:
        """Run one of the first updates, or capture and run the graph."""
        with fast_math(self.flat.data.dtype == torch.bfloat16):
            if self._made < WARM_UP:
                on_side_stream(self.run_eagerly)
                return
            generators = [self.replay.rng, self.autograd.rng]
            try:
                plain = capture_graph(lambda: self.run_eagerly(False), generators)
                self._graphs = (plain, capture_graph(self.run_eagerly, generators, plain))
                self._graphs[with_metrics].replay()
                log.info("learner.capture: the update is recorded as one CUDA graph")
            except RuntimeError as error:
                log.warning("learner.capture: this agent's update cannot be recorded as a CUDA graph (%s); it runs "
                            "operation by operation", first_line(error))
                self._made = -1 << 60  # no second attempt
                self.run_eagerly()
