"""A parameter server (Nair et al. 2015, Gorila) without its wire: shards hold slices of the weights and the optimizer.

    worker ── push(slice of a gradient, version it was derived at) ──▶ shard: checks, compensation, clip, step
           ◀─ pull ── (version, weights) ── copied between two steps, never during one

Every shard counts its own versions, and one push is one version. Shards do not wait for each other: what a worker pulls
from several of them is whole within each, and says of each how old it is.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from pydantic import Field

from qfleet.config import Config, Count, Fraction, NonNegative, PositiveCount
from qfleet.maths.delay import compensate
from qfleet.roles.optimizer import Optimizer, OptimizerConfig, slices


class ServerConfig(Config):
    """How learners meet at a parameter server."""

    shards: PositiveCount = Field(1, description="servers, each with a slice of the parameters")
    push_period_updates: PositiveCount = Field(1, description="updates whose gradients are averaged into one push")
    pull_period_updates: PositiveCount = Field(1, description="updates between two pulls of the parameters")
    max_staleness: Count | None = Field(None, description="gradients older by more versions are dropped, none = never")
    compensation: Literal["none", "constant", "adaptive"] = Field(
        "none", description="delay compensation of Zheng et al. 2017")
    compensation_lambda: NonNegative = Field(0.04, description="its strength")
    compensation_decay: Fraction = Field(0.95, description="of the mean square that the adaptive strength is made of")
    compress: Literal["none", "bf16"] = Field("none", description="how gradients travel")

    def inactive(self) -> dict[str, str]:
        idle = {} if self.compensation != "none" else {"compensation_lambda": "with server.compensation=none"}
        if self.compensation != "adaptive":
            idle["compensation_decay"] = "unless server.compensation=adaptive"
        return idle


@dataclass(frozen=True)
class Push:
    """A slice of a gradient. `norm` is that of the whole, for clipping; `sequence` tells a repetition from the next."""

    worker: str
    sequence: int
    version: int
    norm: float
    gradient: torch.Tensor


@dataclass(frozen=True)
class Answer:
    """What became of a push. `staleness` is by how many versions the weights had moved on."""

    verdict: Literal["applied", "stale", "repeated"]
    version: int
    staleness: int


@dataclass(frozen=True)
class Shown:
    """Weights of one version; nobody writes to them."""

    version: int
    weights: torch.Tensor


class Refused(ValueError):
    """A push that must not be applied: the text names worker and reason."""


class Shelf(Protocol):
    """One shard, here or elsewhere."""

    def push(self, push: Push) -> Answer: ...
    def pull(self, worker: str) -> Shown: ...


class Shard:
    """Holds a slice of the weights. Calls may come from any thread; each takes effect as a whole, once."""

    def __init__(self, name: str, weights: torch.Tensor, optimizer: OptimizerConfig, cfg: ServerConfig) -> None:
        self.name, self.cfg = name, cfg
        self.weights = weights.detach().clone()
        self.optimizer = Optimizer(optimizer, self.weights)
        self.version = 0
        self.staleness: dict[int, int] = defaultdict(int)  # of all pushes, dropped ones included: age -> how many
        self.dropped = 0
        self._square = torch.zeros_like(self.weights) if cfg.compensation == "adaptive" else None
        self._shown = Shown(0, self.weights.clone())
        self._pulled: dict[str, Shown] = {}
        self._answers: dict[str, tuple[int, Answer]] = {}
        self._lock = threading.Lock()

    def pull(self, worker: str) -> Shown:
        with self._lock:
            if self._shown.version != self.version:
                self._shown = Shown(self.version, self.weights.clone())
            self._pulled[worker] = self._shown
            return self._shown

    def push(self, push: Push) -> Answer:
        """Apply a slice of a gradient, unless it is too old, or has been seen before; Refused if it makes no sense."""
        with self._lock:
            sequence, answer = self._answers.get(push.worker, (-1, None))
            if answer is not None and push.sequence <= sequence:
                return Answer("repeated", self.version, answer.staleness)
            self._check(push)
            age = self.version - push.version
            self.staleness[age] += 1
            if self.cfg.max_staleness is not None and age > self.cfg.max_staleness:
                self.dropped += 1
                answer = Answer("stale", self.version, age)
            else:
                self.optimizer.step(self._compensated(push), push.norm)
                self.version += 1
                answer = Answer("applied", self.version, age)
            self._answers[push.worker] = (push.sequence, answer)
            return answer

    def _check(self, push: Push) -> None:
        where = f"{self.name} refuses a gradient of {push.worker}"
        if push.gradient.shape != self.weights.shape:
            raise Refused(f"{where}: its shape is {tuple(push.gradient.shape)}, not {tuple(self.weights.shape)}")
        if push.version > self.version:
            raise Refused(f"{where}: it was derived at version {push.version}, and this server, restored from a "
                          f"checkpoint, is at {self.version}; pull first")
        if not (torch.isfinite(push.gradient).all() and 0 <= push.norm < float("inf")):
            raise Refused(f"{where}: it is not finite")

    def _compensated(self, push: Push) -> torch.Tensor:
        gradient = push.gradient.to(self.weights.dtype, copy=True)
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
            return {"weights": self.weights.clone(), "optimizer": self.optimizer.state_dict(), "version": self.version,
                    "dropped": self.dropped, "staleness": {str(age): n for age, n in self.staleness.items()},
                    "square": None if self._square is None else self._square.clone(),
                    "sequences": {worker: sequence for worker, (sequence, _) in self._answers.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        with self._lock:
            self.weights.copy_(state["weights"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.version, self.dropped = state["version"], state["dropped"]
            self.staleness = defaultdict(int, {int(age): n for age, n in state["staleness"].items()})
            if self._square is not None and state["square"] is not None:
                self._square = state["square"].clone()
            self._answers = {worker: (sequence, Answer("repeated", self.version, 0))
                             for worker, sequence in state["sequences"].items()}
            self._pulled.clear()
            self._shown = Shown(self.version, self.weights.clone())


def shards_of(master: torch.Tensor, optimizer: OptimizerConfig, cfg: ServerConfig) -> list[Shard]:
    """A vector, dealt out to the servers."""
    cuts = slices(len(master), cfg.shards)
    return [Shard(f"shard {index}", master[cut], optimizer, cfg) for index, cut in enumerate(cuts)]
