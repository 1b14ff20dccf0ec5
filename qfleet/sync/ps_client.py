"""Gradient synchronisation with a parameter server: push the gradient, pull the weights."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from qfleet.core.agent import ROW_MOMENTS
from qfleet.core.metrics import Metrics
from qfleet.optim.flat_params import Flat
from qfleet.optim.optimizer import split_evenly
from qfleet.optim.row_moments import RowMoments, moments_of
from qfleet.sync.gradient_sync import Grads, norm_of
from qfleet.sync.ps_shard import ParameterServerConfig, Push, PushPullResult, ShardClient, WeightSnapshot


class ParameterServerSync:
    """Implements `GradientSync`. A single learner that pulls after every push equals `Solo` bit by bit.

    `updates` is the number of updates that all learners have applied, as known to this process. The
    `first` learner sends its network's buffers (running statistics) to the first shard, from which
    new learners and evaluators get them. `row_moments` returns the learner's moments of rows, None without running
    statistics: those of new rows are sent with every push, and those of all learners come back with the weights.
    """

    def __init__(self, worker: str, shard_clients: Sequence[ShardClient], cfg: ParameterServerConfig, metrics: Metrics,
                 first: bool = True, row_moments: Callable[[], RowMoments | None] = lambda: None) -> None:
        self.worker, self.shard_clients, self.cfg, self.metrics, self.first = worker, shard_clients, cfg, metrics, first
        self._row_moments = row_moments
        self._sequence = self._since_push = self._since_pull = 0
        self._bytes = self._updates_made = 0
        self._seconds = 0.0

    def attach(self, flat: Flat) -> None:
        """Load the server's weights, which are authoritative, into the network."""
        self.flat, self.shard_slices = flat, split_evenly(len(flat.master), len(self.shard_clients))
        self._gradient_sum = torch.zeros_like(flat.master)
        self._local = [("", 0)] * len(self.shard_clients)  # epoch and version of the local weights of each shard
        self._newest = [0] * len(self.shard_clients)
        self._push_pull(None, 0.0, pull=True, moments=None)
        self._bytes = 0

    @property
    def updates(self) -> int:
        return min(self._newest)

    def update_count(self, before: int, made: int) -> int:
        """The run's update count, which the shards keep; it never decreases, even if a restored shard is behind."""
        return max(before, self.updates)

    @property
    def local_optimizer(self) -> None:
        """None: gradients are synchronised."""

    def agree(self, max_weight: float | None) -> float | None:
        """Agree whenever there is a batch: updates are asynchronous."""
        return None if max_weight is None else 1.0

    def skips_frozen(self) -> bool:
        """False: the server counts the updates, and other learners push too."""
        return False

    def apply(self, grads: Grads | None) -> float:
        if grads is None:
            return math.nan
        gradient = self.flat.gather(grads)
        norm = norm_of(gradient)
        if not math.isfinite(norm):
            return norm
        self._updates_made += 1
        self._since_push += 1
        self._since_pull += 1
        sent: torch.Tensor | None = gradient
        if self.cfg.push_period_updates > 1:
            sent = self._averaged(gradient)
        if sent is not None:
            self._since_push = 0
            self._sequence += 1
        if pull := self._since_pull >= self.cfg.pull_period_updates:
            self._since_pull = 0
        if pull or sent is not None:
            self._push_pull(sent, norm if sent is gradient or sent is None else norm_of(sent), pull,
                            self._row_moments())
        return norm

    def _averaged(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Mean gradient of the push period at its end, None before."""
        self._gradient_sum += gradient
        if self._since_push < self.cfg.push_period_updates:
            return None
        mean = self._gradient_sum / self._since_push
        self._gradient_sum.zero_()
        return mean

    def _push_pull(self, gradient: torch.Tensor | None, norm: float, pull: bool, moments: RowMoments | None) -> None:
        """Call all shards concurrently and apply their results."""
        start = time.perf_counter()
        calls = [shard.push_pull(self.worker, push, pull)
                 for shard, push in zip(self.shard_clients, self._pushes(gradient, norm, moments), strict=True)]
        results = [self._pull_if_restored(index, call()) for index, call in enumerate(calls)]
        self._seconds += time.perf_counter() - start
        staleness = []
        for index, (answer, snapshot) in enumerate(results):
            if answer is not None:
                self._newest[index] = answer.version
                staleness.append(answer.staleness)
            if snapshot is not None:
                self._load_slice(index, snapshot)
                if gradient is None:
                    self.flat.set_buffers(snapshot.buffers)
                if moments is not None and index == 0:
                    moments.replace(moments_of(snapshot.buffers))
        if staleness:
            self.metrics.write({"server/staleness": sum(staleness) / len(staleness)})
        self.flat.copy_to_network()

    def _pushes(self, gradient: torch.Tensor | None, norm: float, moments: RowMoments | None) -> list[Push | None]:
        if gradient is None:
            return [None] * len(self.shard_clients)
        wire = gradient.bfloat16() if self.cfg.compress == "bf16" else gradient
        self._bytes += wire.nbytes
        buffers = {name: value.cpu().clone() for name, value in self.flat.net.named_buffers()
                   if name not in ROW_MOMENTS} if self.first else {}
        unsent = [] if moments is None else [torch.from_numpy(new.to_row()) for new in moments.take_unsent()]
        rows = torch.stack(unsent) if unsent else None
        return [Push(self.worker, self._sequence, epoch, version, norm, wire[piece],
                     *(({}, None) if index else (buffers, rows)))
                for index, (piece, (epoch, version)) in enumerate(zip(self.shard_slices, self._local, strict=True))]

    def _pull_if_restored(self, index: int, result: PushPullResult) -> PushPullResult:
        """Pull the weights of a shard that was restored meanwhile, since it ignored the push."""
        answer, snapshot = result
        if answer is not None and answer.verdict == "anew" and snapshot is None:
            return answer, self.shard_clients[index].push_pull(self.worker, None, True)()[1]
        return result

    def _load_slice(self, index: int, snapshot: WeightSnapshot) -> None:
        self.flat.master[self.shard_slices[index]].copy_(snapshot.weights)
        self._local[index], self._newest[index] = (snapshot.epoch, snapshot.version), snapshot.version
        self._bytes += snapshot.weights.nbytes

    def gauges(self) -> dict[str, float]:
        """Bytes exchanged and milliseconds spent per update since the last call."""
        sent, made, seconds = self._bytes, self._updates_made, self._seconds
        self._bytes, self._updates_made, self._seconds = 0, 0, 0.0
        return {"comm/bytes_per_update": sent / made, "server/push_pull_ms": 1000 * seconds / made} if made else {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Ignore the checkpoint and pull the server's weights, which are authoritative."""
        self._push_pull(None, 0.0, pull=True, moments=None)
        self._bytes = 0
