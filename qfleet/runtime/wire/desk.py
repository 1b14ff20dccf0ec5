"""What a fleet's questions are answered from: facts that the main thread states and any thread may read."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from qfleet.runtime.wire.fleet_pb2 import FetchReply
from qfleet.runtime.wire.tensors import pack_weights


@dataclass(frozen=True)
class Facts:
    """Where the run stands. Replaced as a whole, never changed: a reader sees all of one moment."""

    steps: int = 0
    updates: int = 0
    phase: str = "starting"
    told_at: float = 0.0
    stopped: bool = False
    final: bool = False
    booked: Mapping[int, int] = field(default_factory=dict)  # steps of every cell, where there are several
    save: int = 0  # the checkpoint that cells shall give their part of, 0 = none
    saved: Mapping[int, int] = field(default_factory=dict)  # of every cell: whose part of it is in the newest on disk

    def elsewhere(self, index: int) -> int:
        """Steps of all cells but one."""
        return sum(self.booked.values()) - self.booked.get(index, 0)


class Bundle:
    """Weights of one version, as tensors and, once somebody asked for them, as the bytes of the reply."""

    def __init__(self, state: dict[str, torch.Tensor], version: int) -> None:
        self.state, self.version = state, version
        self._lock = threading.Lock()
        self._reply: bytes | None = None

    @property
    def asked_for(self) -> bool:
        return self._reply is not None

    def reply(self) -> bytes:
        """A FetchReply, serialised by the first who asks, while others wait for the same bytes."""
        with self._lock:
            if self._reply is None:
                self._reply = FetchReply(version=self.version, weights=pack_weights(self.state)).SerializeToString()
            return self._reply


class Desk:
    """The main thread tells; RPC threads read. Assignments of one reference, so nothing is locked.

    `epoch` is drawn anew by every cell process: who was greeted by another cell must say hello again.
    As `types.Weights` it is the mailbox that the learner publishes to.
    """

    def __init__(self, config_yaml: str, spec_json: str, actors: int) -> None:
        self.config_yaml, self.spec_json, self.actors = config_yaml, spec_json, actors
        self.epoch = secrets.token_hex(8)
        self.facts = Facts(told_at=time.monotonic())
        self.bundle = Bundle({}, -1)

    def tell(self, steps: int, updates: int, phase: str) -> None:
        """Called whenever the main loop turns: the run's clocks, and a sign that the loop is alive."""
        self.facts = replace(self.facts, steps=steps, updates=updates, phase=phase, told_at=time.monotonic())

    def stop(self) -> None:
        """The run is over: whoever asks next is told to leave."""
        self.facts = replace(self.facts, stopped=True)

    def book(self, booked: Mapping[int, int]) -> None:
        """Steps of every cell since this process began, as of this moment."""
        self.facts = replace(self.facts, booked=dict(booked))

    def ask_parts(self, save: int) -> None:
        """All cells shall give their parts of a checkpoint and wait; 0 lets them go on."""
        self.facts = replace(self.facts, save=save)

    def has_saved(self, parts: Mapping[int, int]) -> None:
        """A checkpoint has reached the disk: of every cell, the number of the order that its part was given for."""
        self.facts = replace(self.facts, saved=dict(parts))

    def ask_final(self) -> None:
        """The newest weights are the last: the evaluator shall judge them."""
        self.facts = replace(self.facts, final=True)

    @property
    def wanted(self) -> bool:
        """Whether somebody has the newest weights, and so may ask for newer ones."""
        return self.bundle.version < 0 or self.bundle.asked_for

    def publish(self, state: dict[str, torch.Tensor], version: int) -> None:
        """The tensors must not change afterwards."""
        self.bundle = Bundle(state, version)

    def fetch(self, newer_than: int) -> tuple[int, dict[str, torch.Tensor]] | None:
        bundle = self.bundle
        return (bundle.version, bundle.state) if bundle.version > newer_than else None

    def state_dict(self) -> dict[str, Any]:
        return {"version": self.bundle.version, "state": self.bundle.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.publish(dict(state["state"]), state["version"])
