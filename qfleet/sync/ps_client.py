"""The gradient rule of a learner whose weights live at a parameter server: push the gradient, pull the weights."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from qfleet.core.metrics import Metrics
from qfleet.learner.flat_params import Flat
from qfleet.learner.optimizer import split_evenly
from qfleet.sync.gradient_sync import Grads, norm_of
from qfleet.sync.ps_shard import ParameterServerConfig, Push, PushPullResult, ShardClient, WeightSnapshot


class ParameterServerSync:
    """Implements `Gradients`. Alone at its server, and pulling after every push, it is `Solo`, bit by bit.

    `updates` counts what all learners together have applied, as far as is known here. The learner that is `first`
    gives its network's running figures to the first shard, which has them for whoever begins or evaluates.
    """

    def __init__(self, worker: str, shard_clients: Sequence[ShardClient], cfg: ParameterServerConfig, metrics: Metrics,
                 first: bool = True) -> None:
        self.worker, self.shard_clients, self.cfg, self.metrics, self.first = worker, shard_clients, cfg, metrics, first
        self._sequence = self._since_push = self._since_pull = 0
        self._bytes = self._made = 0
        self._spent = 0.0

    def attach(self, flat: Flat) -> None:
        """The server's weights are the truth: they replace those of the network."""
        self.flat, self.shard_slices = flat, split_evenly(len(flat.master), len(self.shard_clients))
        self._sum = torch.zeros_like(flat.master)
        self._held = [("", 0)] * len(self.shard_clients)  # epoch and version of the weights that are here
        self._newest = [0] * len(self.shard_clients)
        self._push_pull(None, 0.0, pull=True)
        self._bytes = 0

    @property
    def updates(self) -> int:
        return min(self._newest)

    def next_update_count(self, updates: int) -> int:
        """The run's updates after one more of ours: never fewer, even if a shard was restored and is behind."""
        return max(updates, self.updates)

    def agree(self, max_weight: float | None) -> float | None:
        """Nobody waits for anybody."""
        return None if max_weight is None else 1.0

    def skips_frozen(self) -> bool:
        """The server counts, and others push, too."""
        return False

    def apply(self, grads: Grads | None) -> float:
        if grads is None:
            return math.nan
        gradient = self.flat.gather(grads)
        norm = norm_of(gradient)
        if not math.isfinite(norm):
            return norm
        self._made += 1
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
            self._push_pull(sent, norm if sent is gradient or sent is None else norm_of(sent), pull)
        return norm

    def _averaged(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """The mean over a period, at its end."""
        self._sum += gradient
        if self._since_push < self.cfg.push_period_updates:
            return None
        mean = self._sum / self._since_push
        self._sum.zero_()
        return mean

    def _push_pull(self, gradient: torch.Tensor | None, norm: float, pull: bool) -> None:
        """Talk to all shards at once."""
        since = time.perf_counter()
        calls = [shelf.push_pull(self.worker, push, pull)
                 for shelf, push in zip(self.shard_clients, self._pushes(gradient, norm), strict=True)]
        met = [self._again(index, call()) for index, call in enumerate(calls)]
        self._spent += time.perf_counter() - since
        ages = []
        for index, (answer, shown) in enumerate(met):
            if answer is not None:
                self._newest[index] = answer.version
                ages.append(answer.staleness)
            if shown is not None:
                self._take(index, shown)
                if gradient is None:
                    self.flat.set_buffers(shown.buffers)
        if ages:
            self.metrics.write({"server/staleness": sum(ages) / len(ages)})
        self.flat.copy_to_network()

    def _pushes(self, gradient: torch.Tensor | None, norm: float) -> list[Push | None]:
        if gradient is None:
            return [None] * len(self.shard_clients)
        wire = gradient.bfloat16() if self.cfg.compress == "bf16" else gradient
        self._bytes += wire.nbytes
        buffers = {name: value.cpu().clone() for name, value in self.flat.net.named_buffers()} if self.first else {}
        return [Push(self.worker, self._sequence, epoch, version, norm, wire[piece], {} if index else buffers)
                for index, (piece, (epoch, version)) in enumerate(zip(self.shard_slices, self._held, strict=True))]

    def _again(self, index: int, met: PushPullResult) -> PushPullResult:
        """A shard that was restored since took nothing: its weights are pulled, wanted or not."""
        answer, shown = met
        if answer is not None and answer.verdict == "anew" and shown is None:
            return answer, self.shard_clients[index].push_pull(self.worker, None, True)()[1]
        return met

    def _take(self, index: int, shown: WeightSnapshot) -> None:
        self.flat.master[self.shard_slices[index]].copy_(shown.weights)
        self._held[index], self._newest[index] = (shown.epoch, shown.version), shown.version
        self._bytes += shown.weights.nbytes

    def gauges(self) -> dict[str, float]:
        """A gauge: what was exchanged for an update since it was last asked, sent or shared, and how long that took."""
        sent, made, spent, self._bytes, self._made, self._spent = self._bytes, self._made, self._spent, 0, 0, 0.0
        return {"comm/bytes_per_update": sent / made, "server/meet_ms": 1000 * spent / made} if made else {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Whatever the network was given, the server's weights are newer."""
        self._push_pull(None, 0.0, pull=True)
        self._bytes = 0


def bytes_per_update(parameters: int, cfg: ParameterServerConfig) -> float:
    """What a learner exchanges for one update: gradients up, float32 weights down."""
    number = 2 if cfg.compress == "bf16" else 4
    return parameters * (number / cfg.push_period_updates + 4 / cfg.pull_period_updates)
