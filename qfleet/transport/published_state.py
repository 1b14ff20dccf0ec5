"""What a fleet's questions are answered from: facts that the main thread states and any thread may read."""

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
    """Where the run stands. Replaced as a whole, never changed: a reader sees all of one moment."""

    steps: int = 0
    updates: int = 0
    phase: str = "starting"
    updated_at: float = 0.0
    stopped: bool = False
    final: bool = False
    member_steps: Mapping[int, int] = field(default_factory=dict)  # steps of every cell, where there are several
    save: int = 0  # the checkpoint that cells shall give their part of, 0 = none
    saved: Mapping[int, int] = field(default_factory=dict)  # of every cell: whose part of it is in the newest on disk

    def remote_steps(self, index: int) -> int:
        """Steps of all cells but one."""
        return sum(self.member_steps.values()) - self.member_steps.get(index, 0)


class PublishedWeights:
    """Weights of one version, as tensors and, once somebody asked for them, as the bytes of the reply."""

    def __init__(self, state: dict[str, torch.Tensor], version: int) -> None:
        self.state, self.version = state, version
        self._lock = threading.Lock()
        self._reply: bytes | None = None

    @property
    def was_fetched(self) -> bool:
        return self._reply is not None

    def reply(self) -> bytes:
        """A FetchReply, serialised by the first who asks, while others wait for the same bytes."""
        with self._lock:
            if self._reply is None:
                self._reply = FetchReply(version=self.version, weights=pack_weights(self.state)).SerializeToString()
            return self._reply


class PublishedState:
    """The main thread tells; RPC threads read. Assignments of one reference, so nothing is locked.

    `epoch` is drawn anew by every cell process: who was greeted by another cell must say hello again.
    As `types.Weights` it is the mailbox that the learner publishes to.
    """

    def __init__(self, config_yaml: str, spec_json: str, actors: int) -> None:
        self.config_yaml, self.spec_json, self.actors = config_yaml, spec_json, actors
        self.epoch = secrets.token_hex(8)
        self.status = PublishedStatus(updated_at=time.monotonic())
        self.weights = PublishedWeights({}, -1)

    def update_progress(self, steps: int, updates: int, phase: str) -> None:
        """Called whenever the main loop turns: the run's clocks, and a sign that the loop is alive."""
        self.status = replace(self.status, steps=steps, updates=updates, phase=phase, updated_at=time.monotonic())

    def stop(self) -> None:
        """The run is over: whoever asks next is told to leave."""
        self.status = replace(self.status, stopped=True)

    def set_member_steps(self, member_steps: Mapping[int, int]) -> None:
        """Steps of every cell since this process began, as of this moment."""
        self.status = replace(self.status, member_steps=dict(member_steps))

    def request_checkpoint_parts(self, save: int) -> None:
        """All cells shall give their parts of a checkpoint and wait; 0 lets them go on."""
        self.status = replace(self.status, save=save)

    def set_saved_parts(self, parts: Mapping[int, int]) -> None:
        """A checkpoint has reached the disk: of every cell, the number of the order that its part was given for."""
        self.status = replace(self.status, saved=dict(parts))

    def request_final_evaluation(self) -> None:
        """The newest weights are the last: the evaluator shall judge them."""
        self.status = replace(self.status, final=True)

    @property
    def has_reader(self) -> bool:
        """Whether somebody has the newest weights, and so may ask for newer ones."""
        return self.weights.version < 0 or self.weights.was_fetched

    def publish(self, state: dict[str, torch.Tensor], version: int) -> None:
        """The tensors must not change afterwards."""
        self.weights = PublishedWeights(state, version)

    def fetch(self, newer_than: int) -> tuple[int, dict[str, torch.Tensor]] | None:
        bundle = self.weights
        return (bundle.version, bundle.state) if bundle.version > newer_than else None

    def state_dict(self) -> dict[str, Any]:
        return {"version": self.weights.version, "state": self.weights.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.publish(dict(state["state"]), state["version"])
