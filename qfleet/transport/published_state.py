"""State that the learner's main thread publishes and RPC threads read."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from qfleet.transport.fleet_pb2 import FetchReply
from qfleet.transport.weight_codec import pack_weights


@dataclass(frozen=True)
class PublishedStatus:
    """Status of the run. Immutable and replaced as a whole, so that a reader sees a consistent state."""

    steps: int = 0
    updates: int = 0
    phase: str = "starting"
    updated_at: float = 0.0
    stopped: bool = False
    final: bool = False
    wanted_version: int = -1  # of the weights that the evaluator is asked to evaluate, -1 = none
    member_steps: Mapping[int, int] = field(default_factory=dict)  # steps of each parameter-server worker, by index
    save: int = 0  # checkpoint that workers are to send their parts of, 0 = none
    saved: Mapping[int, int] = field(default_factory=dict)  # by worker: checkpoint request of its part on disk

    def remote_steps(self, index: int) -> int:
        """Steps of all workers except `index`."""
        return sum(self.member_steps.values()) - self.member_steps.get(index, 0)


class PublishedWeights:
    """Weights of one version, as tensors and, once fetched, as the serialised reply."""

    def __init__(self, state: dict[str, torch.Tensor], version: int) -> None:
        self.state, self.version = state, version
        self._lock = threading.Lock()
        self._reply: bytes | None = None

    @property
    def was_fetched(self) -> bool:
        return self._reply is not None

    def reply(self) -> bytes:
        """FetchReply, serialised by the first caller while others wait for the same bytes."""
        with self._lock:
            if self._reply is None:
                self._reply = FetchReply(version=self.version, weights=pack_weights(self.state)).SerializeToString()
            return self._reply


class PublishedState:
    """Published state: written by the main thread, read by RPC threads. Each write is one assignment, so no locks.

    `epoch` is drawn by every learner process: members that registered with an earlier one must send hello again.
    Implements `WeightStore`.
    """

    def __init__(self, config_yaml: str, spec_json: str, actors: int) -> None:
        self.config_yaml, self.spec_json, self.actors = config_yaml, spec_json, actors
        self.epoch = secrets.token_hex(8)
        self.status = PublishedStatus(updated_at=time.monotonic())
        self.weights = PublishedWeights({}, -1)

    def update_progress(self, steps: int, updates: int, phase: str) -> None:
        """Publish the clocks of the run.

        Called on every turn of the main loop, so it also shows that the loop is alive.
        """
        self.status = replace(self.status, steps=steps, updates=updates, phase=phase, updated_at=time.monotonic())

    def stop(self) -> None:
        """End the run: every further message is answered with STOP."""
        self.status = replace(self.status, stopped=True)

    def set_member_steps(self, member_steps: Mapping[int, int]) -> None:
        """Publish the steps of each worker since this process started."""
        self.status = replace(self.status, member_steps=dict(member_steps))

    def request_checkpoint_parts(self, save: int) -> None:
        """Ask all workers to send their parts of a checkpoint and wait; 0 lets them continue."""
        self.status = replace(self.status, save=save)

    def set_saved_parts(self, parts: Mapping[int, int]) -> None:
        """Record that a checkpoint is on disk: by worker, the number of the request that its part answered."""
        self.status = replace(self.status, saved=dict(parts))

    def request_evaluation(self) -> None:
        """Ask the evaluator to evaluate the newest weights, or newer ones, while training goes on."""
        self.status = replace(self.status, wanted_version=self.weights.version)

    def request_final_evaluation(self) -> None:
        """Tell the evaluator that the newest weights are the last ones and are to be evaluated."""
        self.status = replace(self.status, final=True, wanted_version=self.weights.version)

    @property
    def has_reader(self) -> bool:
        """True if the newest weights were fetched, so that newer ones may be wanted."""
        return self.weights.version < 0 or self.weights.was_fetched

    def publish(self, state: dict[str, torch.Tensor], version: int) -> None:
        """Publish weights. The tensors must not change afterwards."""
        self.weights = PublishedWeights(state, version)

    def fetch(self, newer_than: int) -> tuple[int, dict[str, torch.Tensor]] | None:
        weights = self.weights
        return (weights.version, weights.state) if weights.version > newer_than else None

    def state_dict(self) -> dict[str, Any]:
        return {"version": self.weights.version, "state": self.weights.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.publish(dict(state["state"]), state["version"])
