"""Parameter server (Gorila, Nair et al. 2015): each shard holds a slice of weights and optimizer state.

    worker ── push(slice of a gradient, version of its weights) ──▶ shard: check, compensate, clip, step
           ◀─ pull ── (version, weights) ── copied between two steps, never during one

Every shard counts its own versions; one push is one version. Shards do not wait for each other: the
weights pulled from several shards are consistent within each, with one version per shard. A
restored shard has a new epoch, and gradients computed from weights of an older epoch are not
applied.
"""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from pydantic import Field

from qfleet.config import Config, Count, Fraction, NonNegative, Positive, PositiveCount
from qfleet.core.agent import ROW_MOMENTS
from qfleet.maths.delay_compensation import compensate
from qfleet.maths.moments import Moments
from qfleet.optim.flat_params import is_finite
from qfleet.optim.optimizer import (
    COUNTERS,
    ParamShape,
    ParamSlice,
    split_evenly,
    vectors_of,
)
from qfleet.optim.optimizer_config import OptimizerConfig
from qfleet.optim.row_moments import buffers_of, moments_of
from qfleet.optim.torch_optimizer import PREFIX, make_optimizer


class ParameterServerConfig(Config):
    """The parameter_server section: learners with an asynchronous parameter server (sync=server)."""

    shards: PositiveCount = Field(1, description="number of server processes, each with a slice of the parameters")
    push_period_updates: PositiveCount = Field(
        1, description="updates of a learner whose gradients are averaged into one push")
    pull_period_updates: PositiveCount = Field(
        1, description="updates of a learner between two pulls of the parameters")
    max_staleness: Count | None = Field(
        None, description="drop gradients that are more than this many parameter versions old; null = never")
    outlier_deviations: Positive | None = Field(
        None, description="drop items whose loss exceeds the running mean by more than this many standard deviations; "
                          "null = never, Gorila uses 6")
    compensation: Literal["none", "constant", "adaptive"] = Field(
        "none", description="delay compensation of stale gradients (DC-ASGD, Zheng et al. 2017): none, constant or "
                            "adaptive")
    compensation_lambda: NonNegative = Field(0.04, description="λ: strength of the delay compensation")
    compensation_decay: Fraction = Field(
        0.95, description="decay of the running mean square of gradients that scales the adaptive λ")
    compress: Literal["none", "bf16"] = Field(
        "none", description="data type of pushed gradients: none (fp32), or bf16 for half the traffic")
    snapshot_period_updates: PositiveCount = Field(
        100, description="updates between copies of a shard to disk; a shard that dies is restored from the last one")

    def inactive(self) -> dict[str, str]:
        idle = {} if self.compensation != "none" else {"compensation_lambda": "with parameter_server.compensation=none"}
        if self.compensation != "adaptive":
            idle["compensation_decay"] = "unless parameter_server.compensation=adaptive"
        return idle


@dataclass(frozen=True)
class Push:
    """A slice of a gradient.

    `norm` is that of the full gradient, for clipping. `sequence` distinguishes a repeated push from
    the next one. `epoch` and `version` are those of the weights used to compute it. `buffers` are
    running statistics of the network; one worker sends them to one shard, which passes them on to
    readers. `rows` [chunks, 1 + 2K] are moments of new rows, for an agent's running statistics; the
    shard merges those of all workers into its buffers `ROW_MOMENTS`.
    """

    worker: str
    sequence: int
    epoch: str
    version: int
    norm: float
    gradient: torch.Tensor
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    rows: torch.Tensor | None = None


@dataclass(frozen=True)
class PushResult:
    """Result of a push. `staleness` is the number of versions between its weights and the current ones."""

    verdict: Literal["applied", "stale", "repeated", "anew"]
    version: int
    staleness: int


@dataclass(frozen=True)
class WeightSnapshot:
    """Weights of one version. Not modified before the next call of the shard."""

    epoch: str
    version: int
    weights: torch.Tensor
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)


PushPullResult = tuple[PushResult | None, WeightSnapshot | None]


class PushRejected(ValueError):
    """Invalid push; the message names the worker and the reason."""


class ShardClient(Protocol):
    """Access to one shard, local or remote."""

    def push_pull(self, worker: str, push: Push | None, pull: bool) -> Callable[[], PushPullResult]:
        """Start a push, a pull, or both in this order; the returned function waits for the result.

        It must be called before the next `push_pull`.
        """


class Shard:
    """Holds a slice of the weights. Thread-safe: every call is atomic and takes effect once."""

    def __init__(self, name: str, weights: torch.Tensor, optimizer: OptimizerConfig, cfg: ParameterServerConfig,
                 param_slices: Sequence[ParamSlice] = (), shapes: Sequence[ParamShape] = ()) -> None:
        self.name, self.cfg = name, cfg
        self.epoch = secrets.token_hex(8)
        self.weights = weights.detach().clone()
        self.optimizer = make_optimizer(optimizer, self.weights, param_slices, shapes, divided=True)
        self.version = 0
        self.staleness: Counter[int] = Counter()  # of all pushes, dropped ones included: staleness -> count
        self.stale = self.refused = 0
        self.buffers: Mapping[str, torch.Tensor] = {}
        self._square = torch.zeros_like(self.weights) if cfg.compensation == "adaptive" else None
        self._snapshot = self._make_snapshot()
        self._pulled: dict[str, WeightSnapshot] = {}
        self._last_results: dict[str, tuple[int, PushResult]] = {}
        self._lock = threading.Lock()

    def push_pull(self, worker: str, push: Push | None, pull: bool) -> Callable[[], PushPullResult]:
        result = (None if push is None else self.push(push), self.pull(worker) if pull else None)
        return lambda: result

    def pull(self, worker: str) -> WeightSnapshot:
        with self._lock:
            if self._snapshot.version != self.version or self._snapshot.buffers is not self.buffers:
                self._snapshot = self._make_snapshot()
            if self.cfg.compensation != "none":
                self._pulled[worker] = self._snapshot
            return self._snapshot

    def push(self, push: Push) -> PushResult:
        """Apply a slice of a gradient unless it is too old or a repetition; PushRejected if it is invalid."""
        with self._lock:
            sequence, result = self._last_results.get(push.worker, (-1, None))
            if result is not None and push.sequence <= sequence:
                return PushResult("repeated", self.version, result.staleness)
            if push.epoch != self.epoch:
                self.refused += 1
                return PushResult("anew", self.version, 0)
            gradient = push.gradient.to(self.weights, copy=True)  # copied before the check: other threads may share it
            if (reason := self._find_error(push, gradient)) is not None:
                self.refused += 1
                raise PushRejected(f"{self.name} rejects a gradient from {push.worker}: {reason}")
            self._merge_rows(push.rows)
            staleness = self.version - push.version
            self.staleness[staleness] += 1
            if self.cfg.max_staleness is not None and staleness > self.cfg.max_staleness:
                self.stale += 1
                result = PushResult("stale", self.version, staleness)
            else:
                self.optimizer.step(self._compensated(push, gradient), push.norm)
                self.version += 1
                self.buffers = {**self.buffers, **push.buffers} if push.buffers else self.buffers
                result = PushResult("applied", self.version, staleness)
            self._last_results[push.worker] = (push.sequence, result)
            return result

    def _make_snapshot(self) -> WeightSnapshot:
        return WeightSnapshot(self.epoch, self.version, self.weights.clone(), self.buffers)

    def _find_error(self, push: Push, gradient: torch.Tensor) -> str | None:
        if gradient.shape != self.weights.shape:
            return f"its shape is {tuple(gradient.shape)}, not {tuple(self.weights.shape)}"
        if push.version > self.version:
            return f"it was computed at version {push.version}, but the newest is {self.version}"
        if not (0 <= push.norm < float("inf") and is_finite(gradient)):
            return "it is not finite"
        if push.rows is not None:
            if ROW_MOMENTS[1] not in self.buffers:
                return "it has moments of new rows, and the network has no running statistics of rows"
            size = self.buffers[ROW_MOMENTS[1]].numel()
            if push.rows.ndim != 2 or push.rows.shape[1] != 1 + 2 * size or not bool(push.rows.isfinite().all()):
                return (f"its moments of new rows are not finite, or of shape {tuple(push.rows.shape)} instead of "
                        f"[chunks, {1 + 2 * size}]")
        return None

    def _merge_rows(self, rows: torch.Tensor | None) -> None:
        """Add new rows to the running statistics, also those of a push whose gradient is too old."""
        if rows is not None:
            moments = moments_of(self.buffers)
            for row in rows.numpy():
                moments = moments.merge(Moments.from_row(row))
            self.buffers = {**self.buffers, **buffers_of(moments)}

    def _compensated(self, push: Push, gradient: torch.Tensor) -> torch.Tensor:
        pulled = self._pulled.get(push.worker)
        if self.cfg.compensation == "none" or pulled is None or pulled.version != push.version:
            return gradient  # the weights it was computed at are not available
        found = compensate(gradient, self.weights, pulled.weights, self.cfg.compensation_lambda, self._square,
                           self.cfg.compensation_decay)
        if self._square is not None:
            self._square = found.square
        return found.gradient

    def state_dict(self) -> dict[str, Any]:
        """The full state except the weights that workers pulled: they pull again after a restart."""
        with self._lock:
            square = {} if self._square is None else {"compensation": self._square.clone()}
            return {"weights": self.weights.clone(), **self.optimizer.state_dict(), **square, "version": self.version,
                    "staleness": dict(self.staleness), "stale": self.stale, "refused": self.refused,
                    "buffers": dict(self.buffers),
                    "sequences": {worker: sequence for worker, (sequence, _) in self._last_results.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        with self._lock:
            self.weights.copy_(state["weights"])
            self.optimizer.load_state_dict(state)
            self.version, self.stale, self.refused = state["version"], state["stale"], state["refused"]
            self.staleness, self.buffers = Counter(state["staleness"]), dict(state["buffers"])
            if self._square is not None and "compensation" in state:
                self._square = state["compensation"].clone()
            self._last_results = {worker: (sequence, PushResult("repeated", self.version, 0))
                             for worker, sequence in state["sequences"].items()}
            self._pulled.clear()
            self.epoch = secrets.token_hex(8)
            self._snapshot = self._make_snapshot()


def divided_entries(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a shard's state that are divided among the shards: all but the counters."""
    return {name: value for name, value in tensors.items() if name not in COUNTERS}


def is_shard_state(names: Iterable[str]) -> bool:
    """True if vectors of these names are the state of a shard with some optimizer."""
    names = set(names)
    own = {name for name in names if name.startswith(PREFIX)}
    return names - own - {"compensation"} == {"weights"} | (set() if own else {"mean", "square"})


def split_state(full: Mapping[str, Any], version: int, shards: int) -> list[dict[str, Any]]:
    """Split the state of the full vector into states of `shards` shards. Undivided values go to the first."""
    counts: dict[str, Any] = {"staleness": {}, "stale": 0, "refused": 0, "buffers": {}}
    vectors = vectors_of(full, len(full["weights"]))
    return [{name: vector[piece].clone() for name, vector in vectors.items()}
            | {name: full[name].clone() for name in COUNTERS if name in full} | {"version": version, "sequences": {}}
            | {name: full.get(name, empty) if index == 0 else empty for name, empty in counts.items()}
            for index, piece in enumerate(split_evenly(len(full["weights"]), shards))]


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the states of shards into that of the full vector, with the sums of their counters."""
    vectors = vectors_of(states[0], len(states[0]["weights"]))
    staleness = sum((Counter(state["staleness"]) for state in states), Counter[int]())
    return {name: torch.cat([state[name] for state in states]) for name in vectors} | {
        name: max(state[name] for state in states) for name in COUNTERS if name in states[0]} | {
        "staleness": dict(staleness),
        "buffers": states[0]["buffers"],
        "stale": sum(state["stale"] for state in states), "refused": sum(state["refused"] for state in states)}
