"""A parameter server (Nair et al. 2015, Gorila): shards hold slices of the weights and of the optimizer.

    worker ── push(slice of a gradient, version it was derived at) ──▶ shard: checks, compensation, clip, step
           ◀─ pull ── (version, weights) ── copied between two steps, never during one

Every shard counts its own versions, and one push is one version. Shards do not wait for each other: what a worker pulls
from several of them is whole within each, and says of each how old it is. A shard that was restored has another epoch:
what was derived from weights of its former life is not applied.
"""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from pydantic import Field

from qfleet.config import Config, Count, Fraction, NonNegative, Positive, PositiveCount
from qfleet.learner.flat_params import is_finite
from qfleet.learner.optimizer import Optimizer, OptimizerConfig, ParamSlice, slices_within, split_evenly
from qfleet.maths.delay_compensation import compensate


class ParameterServerConfig(Config):
    """The server section: learners with an asynchronous parameter server (gradients=server)."""

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
    copy_period_updates: PositiveCount = Field(
        100, description="updates between copies of a shard to disk; a shard that dies is restored from the last one")

    def inactive(self) -> dict[str, str]:
        idle = {} if self.compensation != "none" else {"compensation_lambda": "with server.compensation=none"}
        if self.compensation != "adaptive":
            idle["compensation_decay"] = "unless server.compensation=adaptive"
        return idle


@dataclass(frozen=True)
class Push:
    """A slice of a gradient. `norm` is that of the whole, for clipping; `sequence` tells a repetition from the next;
    `epoch` and `version` are those of the weights that it was derived at. `buffers` are running figures of the network
    that no gradient moves: one worker gives them to one shard, for those who show the weights to others."""

    worker: str
    sequence: int
    epoch: str
    version: int
    norm: float
    gradient: torch.Tensor
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class PushResult:
    """What became of a push. `staleness` is by how many versions the weights had moved on."""

    verdict: Literal["applied", "stale", "repeated", "anew"]
    version: int
    staleness: int


@dataclass(frozen=True)
class WeightSnapshot:
    """Weights of one version. Nobody writes to them before the shard is met again."""

    epoch: str
    version: int
    weights: torch.Tensor
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)


PushPullResult = tuple[PushResult | None, WeightSnapshot | None]


class PushRejected(ValueError):
    """A push that makes no sense: the text names worker and reason."""


class ShardClient(Protocol):
    """One shard, here or elsewhere."""

    def push_pull(self, worker: str, push: Push | None, pull: bool) -> Callable[[], PushPullResult]:
        """Begin to push, to pull, or both in this order; what is returned waits for the outcome, before the next."""


class Shard:
    """Holds a slice of the weights. Calls may come from any thread; each takes effect as a whole, once."""

    def __init__(self, name: str, weights: torch.Tensor, optimizer: OptimizerConfig, cfg: ParameterServerConfig,
                 parts: Sequence[ParamSlice] = ()) -> None:
        self.name, self.cfg = name, cfg
        self.epoch = secrets.token_hex(8)
        self.weights = weights.detach().clone()
        self.optimizer = Optimizer(optimizer, self.weights, parts)
        self.version = 0
        self.staleness: Counter[int] = Counter()  # of all pushes, dropped ones included: age -> how many
        self.stale = self.refused = 0
        self.buffers: Mapping[str, torch.Tensor] = {}
        self._square = torch.zeros_like(self.weights) if cfg.compensation == "adaptive" else None
        self._shown = self._show()
        self._pulled: dict[str, WeightSnapshot] = {}
        self._answers: dict[str, tuple[int, PushResult]] = {}
        self._lock = threading.Lock()

    def push_pull(self, worker: str, push: Push | None, pull: bool) -> Callable[[], PushPullResult]:
        met = (None if push is None else self.push(push), self.pull(worker) if pull else None)
        return lambda: met

    def pull(self, worker: str) -> WeightSnapshot:
        with self._lock:
            if self._shown.version != self.version:
                self._shown = self._show()
            if self.cfg.compensation != "none":
                self._pulled[worker] = self._shown
            return self._shown

    def push(self, push: Push) -> PushResult:
        """Apply a slice of a gradient, unless it is too old, or has been seen before; Refused if it makes no sense."""
        with self._lock:
            sequence, answer = self._answers.get(push.worker, (-1, None))
            if answer is not None and push.sequence <= sequence:
                return PushResult("repeated", self.version, answer.staleness)
            if push.epoch != self.epoch:
                self.refused += 1
                return PushResult("anew", self.version, 0)
            gradient = push.gradient.to(self.weights, copy=True)  # before it is looked at: others may have it, too
            if (why := self._wrong(push, gradient)) is not None:
                self.refused += 1
                raise PushRejected(f"{self.name} refuses a gradient of {push.worker}: {why}")
            age = self.version - push.version
            self.staleness[age] += 1
            if self.cfg.max_staleness is not None and age > self.cfg.max_staleness:
                self.stale += 1
                answer = PushResult("stale", self.version, age)
            else:
                self.optimizer.step(self._compensated(push, gradient), push.norm)
                self.version += 1
                self.buffers = push.buffers or self.buffers
                answer = PushResult("applied", self.version, age)
            self._answers[push.worker] = (push.sequence, answer)
            return answer

    def _show(self) -> WeightSnapshot:
        return WeightSnapshot(self.epoch, self.version, self.weights.clone(), self.buffers)

    def _wrong(self, push: Push, gradient: torch.Tensor) -> str | None:
        if gradient.shape != self.weights.shape:
            return f"its shape is {tuple(gradient.shape)}, not {tuple(self.weights.shape)}"
        if push.version > self.version:
            return f"it was derived at version {push.version}, and the newest is {self.version}"
        if not (0 <= push.norm < float("inf") and is_finite(gradient)):
            return "it is not finite"
        return None

    def _compensated(self, push: Push, gradient: torch.Tensor) -> torch.Tensor:
        then = self._pulled.get(push.worker)
        if self.cfg.compensation == "none" or then is None or then.version != push.version:
            return gradient  # without the weights of then there is nothing to compensate with
        found = compensate(gradient, self.weights, then.weights, self.cfg.compensation_lambda, self._square,
                           self.cfg.compensation_decay)
        if self._square is not None:
            self._square = found.square
        return found.gradient

    def state_dict(self) -> dict[str, Any]:
        """Everything but what workers have pulled: after a restart they pull anew."""
        with self._lock:
            square = {} if self._square is None else {"compensation": self._square.clone()}
            return {"weights": self.weights.clone(), **self.optimizer.state_dict(), **square, "version": self.version,
                    "staleness": dict(self.staleness), "stale": self.stale, "refused": self.refused,
                    "buffers": dict(self.buffers),
                    "sequences": {worker: sequence for worker, (sequence, _) in self._answers.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        with self._lock:
            self.weights.copy_(state["weights"])
            self.optimizer.load_state_dict(state)
            self.version, self.stale, self.refused = state["version"], state["stale"], state["refused"]
            self.staleness, self.buffers = Counter(state["staleness"]), dict(state["buffers"])
            if self._square is not None and "compensation" in state:
                self._square = state["compensation"].clone()
            self._answers = {worker: (sequence, PushResult("repeated", self.version, 0))
                             for worker, sequence in state["sequences"].items()}
            self._pulled.clear()
            self.epoch = secrets.token_hex(8)
            self._shown = self._show()


VECTORS = ("weights", "mean", "square", "compensation")


def split_state(whole: Mapping[str, Any], version: int, shards: int) -> list[dict[str, Any]]:
    """The state of a whole vector as states of `shards` shards of it. What is not divided stays with the first."""
    counts: dict[str, Any] = {"staleness": {}, "stale": 0, "refused": 0, "buffers": {}}
    vectors = [name for name in VECTORS if name in whole]
    return [{name: whole[name][piece].clone() for name in vectors}
            | {"steps": whole["steps"].clone(), "version": version, "sequences": {}}
            | {name: whole.get(name, nothing) if index == 0 else nothing for name, nothing in counts.items()}
            for index, piece in enumerate(split_evenly(len(whole["weights"]), shards))]


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The other way round, with the sums of what was counted."""
    vectors = [name for name in VECTORS if name in states[0]]
    staleness = sum((Counter(state["staleness"]) for state in states), Counter[int]())
    return {name: torch.cat([state[name] for state in states]) for name in vectors} | {
        "steps": max(state["steps"] for state in states), "staleness": dict(staleness),
        "buffers": states[0]["buffers"],
        "stale": sum(state["stale"] for state in states), "refused": sum(state["refused"] for state in states)}


def make_shards(master: torch.Tensor, optimizer: OptimizerConfig, cfg: ParameterServerConfig,
                parts: Sequence[ParamSlice] = ()) -> list[Shard]:
    """A vector, dealt out to the servers."""
    return [Shard(f"shard {index}", master[piece], optimizer, cfg, slices_within(parts, piece))
            for index, piece in enumerate(split_evenly(len(master), cfg.shards))]
