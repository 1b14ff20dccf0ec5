"""The registrar of a parameter server: it keeps the books of all cells, and learns nothing itself.

    cells ── steps, episodes, figures ──▶ registrar ──▶ run directory, clock, end     cells ⇄ shards: gradients, weights
    evaluator ── scores ──▶ registrar ◀── weights, when an evaluation is due ── shards

For a checkpoint the registrar asks all cells for their parts. A cell that has given its part waits; when the last one
does, nothing is under way, and what the shards hold is of one moment.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from qfleet.core.clock import Schedule
from qfleet.learner.learner import Diverged
from qfleet.runconfig.run_config import RunConfig
from qfleet.runs.checkpoint_parts import StagingArea, unpack_state
from qfleet.sync.gradient_sync import Solo
from qfleet.sync.ps_shard import merge_states, split_state
from qfleet.training.checkpointer import Snapshot
from qfleet.training.loop import drive
from qfleet.training.remote_actors import RemoteActorsRun, await_evaluation
from qfleet.training.replica import PER_RANK_KEYS, per_rank_states, saved_steps, segments_by_rank
from qfleet.transport.address import socket_address
from qfleet.transport.fleet_pb2 import Part
from qfleet.transport.registry import LEARNER
from qfleet.transport.security import read_token
from qfleet.transport.shard_client import GrpcShardChannel, RemoteShard
from qfleet.transport.shard_pb2 import LookReply

log = logging.getLogger(__name__)

LOOK_S = 0.1
PARTS_S = 60.0
"""The longest that all wait for the part of a cell that lives."""

ABSENT: dict[str, Any] = {"replay": None, "actors": [], "clock": {"steps": 0}}
"""The part of a cell that has never given one."""

EXTRA = ("compensation", "staleness", "stale", "refused")
AGES = {"server/staleness_0": 1, "server/staleness_1": 2, "server/staleness_2_3": 4, "server/staleness_4_7": 8,
        "server/staleness_8_15": 16, "server/staleness_16_31": 32, "server/staleness_32_up": 1 << 62}
"""Of the histogram: the age at which each bar ends."""


def shard_socket(private: Path, index: int) -> Path:
    return private / f"shard-{index}.sock"


def connect_shards(config: RunConfig, private: Path) -> list[RemoteShard]:
    token = read_token(private / "token")
    return [RemoteShard(GrpcShardChannel(socket_address(shard_socket(private, index)), token), config.fleet.patience_s)
            for index in range(config.server.shards)]


class Coordinator:
    """Implements `session.Run`: a `Fleet` whose members are cells, and whose weights are what the shards hold."""

    def __init__(self, fleet: RemoteActorsRun, shard_clients: Sequence[RemoteShard], cells: int, folder: Path) -> None:
        self.fleet, self.shard_clients, self.cells, self.folder = fleet, shard_clients, cells, folder
        self.core, self.checkpointer = fleet.core, fleet.checkpointer
        self.checkpointer.snapshot, self.checkpointer.write = self.snapshot, self._write
        self.core.replay.rate_limiter.error_buffer = None  # what arrives here are counts
        self.core.gauges[:] = [self._figures]
        fleet.message_handler.on_checkpoint_part, fleet.beat = self._take_part, self._publish_member_steps
        for shelf in shard_clients:
            shelf.wait = fleet.serve
        eval_ = self.core.plan.eval
        self.evaluations = Schedule(eval_.period_steps, eval_.period_updates)
        self.parts: dict[int, tuple[dict[str, Any], list[str]]] = {}  # what each cell gave last: state, segments
        self.extra: dict[str, Any] = {}
        self._save = 0
        self._given: dict[int, int] = {}  # the order that each part was given for
        self._asking = self._ending = self._held = False
        self._seen: list[LookReply] = [LookReply() for _ in shard_clients]
        self._looked_at = 0.0
        shutil.rmtree(folder, ignore_errors=True)

    def run(self) -> str:
        """Serve until the run ends, let the evaluator judge, save; returns why it ended."""
        fleet, cell, stop = self.fleet, self.core, self.core.stop
        self._load()
        try:
            drive([fleet.message_handler, self, cell.meter, self.checkpointer], stop, fleet.serve)
            self._ending = True
            if stop.reason in ("total_steps", "total_updates"):
                self._gather()
                fleet.message_handler.closing = True
                cell.learner.publish()
                await_evaluation(cell, fleet.message_handler, fleet.registry, fleet.published, fleet.serve)
            self.checkpointer.save()
        finally:
            cell.meter.finish()
        if not stop.is_external:
            fleet.published.stop()
        for shelf in self.shard_clients:
            shelf.shut_down()
        shutil.rmtree(self.folder, ignore_errors=True)
        return stop.reason or "total_steps"

    def step(self) -> bool:
        """Look how far the shards are. What the evaluator will ask for is here before it hears that it is due."""
        learner, now = self.core.learner, time.monotonic()
        if now - self._looked_at >= LOOK_S:
            self._looked_at = now
            self._seen = [
                shelf.status() or before for shelf, before in zip(self.shard_clients, self._seen, strict=True)
            ]
            learner.updates = max(learner.updates, min(seen.version for seen in self._seen))
        if self.evaluations.due(self.core.progress()):
            calls = [shelf.push_pull("registrar", None, True) for shelf in self.shard_clients]
            shown = [call()[1] for call in calls]
            learner.updates = max(learner.updates, min(each.version for each in shown if each is not None))
            self._set_weights([each.weights for each in shown if each is not None])
            for each in shown:
                self._assign({} if each is None else each.buffers)
            learner.publish()
        return False

    def snapshot(self) -> Snapshot:
        if not self._held:
            self._gather()
        base = self.fleet.snapshot()
        given = [self.parts.get(index, (ABSENT, [])) for index in range(self.cells)]
        first, *others = [state for state, _ in given]
        known = first.get("learner", {})
        learner = base.state["learner"] | {name: known[name] for name in ("rng", "target") if name in known}
        state = base.state | first | {"learner": learner, "steps": base.progress.steps, "server": self.extra}
        segments = [StagingArea(self.folder, index).segment(name) for index, (_, names) in enumerate(given)
                    for name in names]
        return replace(base, state=state | ({"ranks": others} if others else {}), segments=segments)

    def restore(self, state: Mapping[str, Any], segments: Iterable[tuple[str, Path]]) -> None:
        """Go on from a checkpoint of any number of cells and shards."""
        pieces, parts = segments_by_rank(pairs := list(segments)), per_rank_states(state)
        if len(parts) == self.cells:
            names = {path: name for name, path in pairs}
            self.parts = {index: (_per_rank_state(part), [names[path] for _, path in pieces.get(index, [])])
                          for index, part in enumerate(parts)}
        self.extra = dict(state.get("server", {}))
        self.fleet.restore({**state, "replay": None, "clock": {"steps": saved_steps(state)}}, [])
        self.evaluations.resume(self.core.progress())

    def _load(self) -> None:
        """Give every shard its slice; each begins a new life with it."""
        learner = self.core.learner
        assert isinstance(learner.gradient_sync, Solo)
        whole = {"weights": learner.flat.master, **learner.gradient_sync.state_dict(), **self.extra,
                 "buffers": {name: value.clone() for name, value in learner.flat.net.named_buffers()}}
        for shelf, state in zip(
            self.shard_clients, split_state(whole, learner.updates, len(self.shard_clients)), strict=True
        ):
            shelf.load(state)

    def _gather(self) -> None:
        """Parts of all cells that live, and what the shards hold meanwhile."""
        self._save += 1
        self._asking = True
        self.fleet.published.request_checkpoint_parts(self._save)
        deadline = time.monotonic() + PARTS_S
        drive([self.fleet.message_handler], lambda: self._complete() or time.monotonic() > deadline, self.fleet.serve)
        self._asking = False
        if not self._complete():
            log.warning("not all cells gave their parts of a checkpoint within %.0f s: what they gave before is kept",
                        PARTS_S)
        try:
            states = [shelf.copy() for shelf in self.shard_clients]
        except ValueError as error:
            raise Diverged(f"what the parameter server holds cannot be saved: {error}; lower learner.learning_rate, or "
                           "set learner.clip_norm") from None
        learner, whole = self.core.learner, merge_states(states)
        assert isinstance(learner.gradient_sync, Solo)
        learner.gradient_sync.load_state_dict(whole)
        learner.updates = max(learner.updates, min(state["version"] for state in states))
        self._set_weights([state["weights"] for state in states])
        self._assign(whole["buffers"])
        if 0 in self.parts:
            self._assign(self.parts[0][0].get("learner", {}).get("buffers", {}))
        self.extra = {name: whole[name] for name in EXTRA if name in whole}
        self._held = self._ending
        if not self._ending:
            self.fleet.published.request_checkpoint_parts(0)

    def _complete(self) -> bool:
        """Whether all have given their parts. Who is dead is not waited for for long: what it gave before is kept."""
        now, live_s = time.monotonic(), self.fleet.registry.live_s
        return all(self._given.get(member.index) == self._save or now - member.heard > live_s
                   for member in self.fleet.registry.members() if member.role == LEARNER)

    def _set_weights(self, slices: Sequence[Any]) -> None:
        flat, at = self.core.learner.flat, 0
        for piece in slices:
            flat.master[at:at + len(piece)] = piece
            at += len(piece)
        flat.copy_to_network()

    def _assign(self, buffers: Mapping[str, Any]) -> None:
        """Take buffers of the cells, but not what an evaluator notes: its scores come here, and the cells have none."""
        notes = self.core.agent.eval_buffers
        self.core.learner.flat.set_buffers({name: value for name, value in buffers.items() if name not in notes})

    def _take_part(self, index: int, part: Part) -> None:
        """Too late is not at all: what its cell wrote is replaced by what it writes next."""
        if not self._asking or part.save != self._save or not 0 <= index < self.cells:
            return
        try:
            self.parts[index] = (_per_rank_state(unpack_state(part.state)), list(part.segments))
            self._given[index] = part.save
        except (ValueError, KeyError, TypeError) as error:
            log.warning("the part of cell %d cannot be read (%s); what it gave before is kept", index, error)

    def _write(self, snapshot: Snapshot) -> None:
        self.fleet.save(snapshot)
        self.fleet.published.set_saved_parts(self._given)

    def _publish_member_steps(self) -> None:
        member_steps = self.fleet.message_handler.member_steps
        if member_steps != self.fleet.published.status.member_steps:
            self.fleet.published.set_member_steps(member_steps)

    def _figures(self) -> dict[str, float]:
        """A gauge: who is there, and what became of the slices of gradients that were pushed."""
        self.fleet.members()  # restarts are counted
        now, live_s = time.monotonic(), self.fleet.registry.live_s
        alive = [member for member in self.fleet.registry.members()
                 if member.role == LEARNER and now - member.heard < live_s]
        figures = {"server/cells": len(alive), "server/stale_pushes": sum(seen.stale for seen in self._seen),
                   "server/refused_pushes": sum(seen.refused for seen in self._seen), **dict.fromkeys(AGES, 0)}
        for seen in self._seen:
            for age, count in seen.staleness.items():
                figures[next(tag for tag, end in AGES.items() if age < end)] += count
        return {tag: float(number) for tag, number in figures.items()}


def _per_rank_state(part: Mapping[str, Any]) -> dict[str, Any]:
    """A part as its cell gave it, without what lies beside it in the first one's."""
    kept = {name: part[name] for name in PER_RANK_KEYS if name in part}
    learner = {name: part["learner"][name] for name in ("rng", "target", "buffers") if name in part.get("learner", {})}
    return kept | ({"learner": learner} if learner else {})
