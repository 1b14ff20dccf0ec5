"""Coordinator of a parameter server: owns the run directory, global clock, metrics and checkpoints; does not train.

    workers ── steps, episodes, metrics ──▶ coordinator ──▶ run directory, clock, end
    workers ⇄ shards: gradients, weights
    evaluator ── scores ──▶ coordinator ◀── weights, when an evaluation is due ── shards

For a checkpoint the coordinator requests the parts of all workers. A worker that has sent its part waits; when the
last one has, no gradient is in flight, and the state of all shards is consistent.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from qfleet.core.clock import Schedule
from qfleet.launch.run_request import RunRequest, shard_socket
from qfleet.learner.learner import Diverged
from qfleet.replay.view import ReplayView
from qfleet.runconfig.run_config import RunConfig
from qfleet.runs.checkpoint_parts import StagingArea, unpack_state
from qfleet.sync.gradient_sync import Solo
from qfleet.sync.ps_shard import merge_states, split_state
from qfleet.training.callbacks import CallbackWorker, RunControl
from qfleet.training.checkpointer import CheckpointWriter, ScheduledSaving, Snapshot
from qfleet.training.learner_core import Components, Hooks, LearnerCore
from qfleet.training.learner_part import learner_part, learner_parts, saved_steps, segments_by_learner
from qfleet.training.loop import TrainingPlan, drive
from qfleet.training.remote_actors import ACTORS, MemberHandlers, RemoteActors, RemoteActorsSetup, merge_actor_metrics
from qfleet.training.timers import TimeShares
from qfleet.transport.address import socket_address
from qfleet.transport.fleet_pb2 import Part
from qfleet.transport.registry import LEARNER
from qfleet.transport.security import read_token
from qfleet.transport.shard_client import GrpcShardChannel, RemoteShard
from qfleet.transport.shard_pb2 import LookReply

log = logging.getLogger(__name__)

POLL_S = 0.1
PARTS_TIMEOUT_S = 60.0
"""Seconds to wait for the checkpoint part of a live worker."""

ABSENT: dict[str, Any] = {"replay": None, "actors": [], "clock": {"steps": 0}}
"""Part of a worker that has never sent one."""

OF_FIRST_WORKER = ("rng", "target", "buffers")
"""Keys of the section `learner` in the part of the first worker, which has the target network and buffers for all."""

EXTRA = ("compensation", "staleness", "stale", "refused")
AGES = {"server/staleness_0": 1, "server/staleness_1": 2, "server/staleness_2_3": 4, "server/staleness_4_7": 8,
        "server/staleness_8_15": 16, "server/staleness_16_31": 32, "server/staleness_32_up": 1 << 62}
"""Staleness histogram: upper bound of each bin."""

NO_REPLAY = "run.replay is empty in a callback: with sync=server every learner has a replay of its own"

Wait = Callable[[float], object]
"""Called with a number of seconds while a shard does not answer; may raise to give up."""

ConnectShards = Callable[[RunConfig, Wait], list[RemoteShard]]
"""Returns the clients of the shards of a config."""


def connect_shards(private: Path) -> ConnectShards:
    """Connects to shards on this host, whose sockets are in the private folder of the run."""
    def connect(config: RunConfig, wait: Wait) -> list[RemoteShard]:
        token = read_token(private / RunRequest.TOKEN_FILE)
        addresses = [socket_address(shard_socket(private, index)) for index in range(config.parameter_server.shards)]
        return [RemoteShard(GrpcShardChannel(address, token), config.fleet.reconnect_timeout_s, wait)
                for address in addresses]

    return connect


class Coordinator:
    """Implements `TrainingRun`: its members are workers, and the shards hold its weights.

    `connect` returns the clients of the shards, given the function that they call while they wait for an answer.
    """

    def __init__(self, setup: RemoteActorsSetup, plan: TrainingPlan, hooks: Hooks,
                 connect: Callable[[Wait], Sequence[RemoteShard]], workers: int, folder: Path) -> None:
        self.setup, self.workers, self.folder = setup, workers, folder
        self.core = LearnerCore(setup.agent, setup.spec, plan, hooks, setup.published, Components.single(plan))
        self.acting = RemoteActors(setup, self.core, TimeShares(), MemberHandlers(
            self._take_part, self._take_metrics, self._publish_member_steps))
        self.checkpoints = CheckpointWriter(plan.checkpoint, self.core.progress, self.core.meter)
        self._evaluation_requested = False
        self.callbacks = CallbackWorker(
            hooks.callbacks, self.core.events,
            RunControl(self.core, self.request_evaluation, self.checkpoints.request,
                       ReplayView(self.core.replay, NO_REPLAY)), self.checkpoints)
        self.core.meter.add_gauge(self._gauges)
        self.shard_clients = connect(self.acting.serve)
        self.evaluations = Schedule(plan.eval.period_steps, plan.eval.period_updates)
        self.parts: dict[int, tuple[dict[str, Any], list[str]]] = {}  # last part of each worker: state, segments
        self.extra: dict[str, Any] = {}
        self._learner_metrics: dict[int, Mapping[str, float]] = {}  # last ones of each worker
        self._request = 0
        self._answered_request: dict[int, int] = {}  # request number that each part answered
        self._collecting = self._ending = self._gathered_last = False
        self._shard_status: list[LookReply] = [LookReply() for _ in self.shard_clients]
        self._polled_at = 0.0
        shutil.rmtree(folder, ignore_errors=True)

    def run(self) -> str:
        """Serve until the run ends, wait for the final evaluation, save; returns the reason of the end."""
        acting, core, stop = self.acting, self.core, self.core.stop
        self._load()
        self.callbacks.start()
        try:
            drive([acting.message_handler, self, core.meter, ScheduledSaving(self.checkpoints, self), self.callbacks],
                  stop, acting.serve)
            self._ending = True
            if stop.reason in ("total_steps", "total_updates"):
                self._gather()
                acting.message_handler.close()
                core.learner.publish()
                acting.await_evaluation()
            self.checkpoints.save(self)
            reason = stop.reason or "total_steps"
            self.callbacks.end(reason)
        finally:
            core.meter.finish()
        acting.end()
        for shard in self.shard_clients:
            shard.shut_down()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.callbacks.raise_failure()
        return reason

    def step(self) -> bool:
        """Poll the shards. When an evaluation is due, publish their weights before the evaluator learns of it."""
        learner, now = self.core.learner, time.monotonic()
        if now - self._polled_at >= POLL_S:
            self._polled_at = now
            self._shard_status = [
                shard.status() or before for shard, before in zip(self.shard_clients, self._shard_status, strict=True)
            ]
            self._count_updates(status.version for status in self._shard_status)
        if self.evaluations.due(self.core.progress()) or self._evaluation_requested:
            calls = [shard.push_pull("coordinator", None, True) for shard in self.shard_clients]
            snapshots = [call()[1] for call in calls]
            self._count_updates(each.version for each in snapshots if each is not None)
            self._set_weights([each.weights for each in snapshots if each is not None])
            for each in snapshots:
                self._assign({} if each is None else each.buffers)
            learner.publish()
            if self._evaluation_requested:
                self._evaluation_requested = False
                self.setup.published.request_evaluation()
        return False

    def request_evaluation(self) -> None:
        """Evaluate the weights of the shards soon, in addition to the schedule."""
        self._evaluation_requested = True

    def _count_updates(self, versions: Iterable[int]) -> None:
        """Count the updates that all shards have applied; the count never decreases."""
        self.core.clock.set_updates(max(self.core.clock.updates, min(versions)))

    def before_checkpoint(self, index: int) -> None:
        """Nothing to do: the workers close their own chunks."""

    def snapshot(self) -> Snapshot:
        if not self._gathered_last:
            self._gather()
        base = self.core.snapshot({"registry": self.setup.registry.state_dict()})
        parts = [self.parts.get(index, (ABSENT, [])) for index in range(self.workers)]
        first, *others = [state for state, _ in parts]
        known = first.get("learner", {})
        learner = base.state["learner"] | {name: known[name] for name in ("rng", "target") if name in known}
        state = base.state | first | {"learner": learner, "steps": base.progress.steps, "server": self.extra}
        segments = [StagingArea(self.folder, index).segment(name) for index, (_, names) in enumerate(parts)
                    for name in names]
        return replace(base, state=state | ({"ranks": others} if others else {}), segments=segments)

    def restore(self, state: Mapping[str, Any], segments: Iterable[tuple[str, Path]]) -> None:
        """Resume from a checkpoint of any number of workers and shards."""
        pieces, parts = segments_by_learner(pairs := list(segments)), learner_parts(state)
        if len(parts) == self.workers:
            names = {path: name for name, path in pairs}
            self.parts = {index: (learner_part(part, OF_FIRST_WORKER),
                                  [names[path] for _, path in pieces.get(index, [])])
                          for index, part in enumerate(parts)}
        self.extra = dict(state.get("server", {}))
        common = {**state, "replay": None, "clock": {"steps": saved_steps(state)}}
        self.core.restore(common, [])
        if "registry" in state:
            self.setup.registry.load_state_dict(state["registry"])
        self.checkpoints.resume()
        self.core.finish_restore(common)
        self.acting.finish_restore(common)
        self.evaluations.resume(self.core.progress())

    def _load(self) -> None:
        """Send every shard its slice; each starts a new epoch with it."""
        learner = self.core.learner
        assert isinstance(learner.gradient_sync, Solo)
        whole = {"weights": learner.flat.master, **learner.gradient_sync.state_dict(), **self.extra,
                 "buffers": {name: value.clone() for name, value in learner.flat.net.named_buffers()}}
        for shard, state in zip(
            self.shard_clients, split_state(whole, learner.updates, len(self.shard_clients)), strict=True
        ):
            shard.load(state)

    def _gather(self) -> None:
        """Collect the parts of all live workers, and the state of the shards while the workers wait."""
        self._request += 1
        self._collecting = True
        self.setup.published.request_checkpoint_parts(self._request)
        deadline = time.monotonic() + PARTS_TIMEOUT_S
        drive([self.acting.message_handler], lambda: self._parts_complete() or time.monotonic() > deadline,
              self.acting.serve)
        self._collecting = False
        if not self._parts_complete():
            log.warning("not all learners sent their parts of a checkpoint within %.0f s: "
                        "their previous parts are kept", PARTS_TIMEOUT_S)
        try:
            states = [shard.copy() for shard in self.shard_clients]
        except ValueError as error:
            raise Diverged(f"the state of the parameter server cannot be saved: {error}; lower learner.learning_rate, "
                           "or set learner.clip_norm") from None
        learner, whole = self.core.learner, merge_states(states)
        assert isinstance(learner.gradient_sync, Solo)
        learner.gradient_sync.load_state_dict(whole)
        self._count_updates(state["version"] for state in states)
        self._set_weights([state["weights"] for state in states])
        self._assign(whole["buffers"])
        if 0 in self.parts:
            self._assign(self.parts[0][0].get("learner", {}).get("buffers", {}))
        self.extra = {name: whole[name] for name in EXTRA if name in whole}
        self._gathered_last = self._ending
        if not self._ending:
            self.setup.published.request_checkpoint_parts(0)

    def _parts_complete(self) -> bool:
        """True if all live workers have sent their parts; of a dead one the previous part is kept."""
        now, live_s = time.monotonic(), self.setup.registry.live_s
        return all(self._answered_request.get(member.index) == self._request or now - member.heard > live_s
                   for member in self.setup.registry.members() if member.role == LEARNER)

    def _set_weights(self, slices: Sequence[Any]) -> None:
        flat, at = self.core.learner.flat, 0
        for piece in slices:
            flat.master[at:at + len(piece)] = piece
            at += len(piece)
        flat.copy_to_network()

    def _assign(self, buffers: Mapping[str, Any]) -> None:
        """Set buffers sent by workers, except those an evaluator writes: scores arrive here, and workers have none."""
        excluded = self.core.agent.eval_buffers
        self.core.learner.flat.set_buffers({name: value for name, value in buffers.items() if name not in excluded})

    def _take_part(self, index: int, part: Part) -> None:
        """Store a worker's part. A late one is ignored: the worker's next part replaces its files."""
        if not self._collecting or part.save != self._request or not 0 <= index < self.workers:
            return
        try:
            self.parts[index] = (learner_part(unpack_state(part.state), OF_FIRST_WORKER), list(part.segments))
            self._answered_request[index] = part.save
        except (ValueError, KeyError, TypeError) as error:
            log.warning("the checkpoint part of learner %d cannot be read (%s); its previous part is kept", index,
                        error)

    def _take_metrics(self, index: int, metrics: Mapping[str, float]) -> None:
        """Keep the gauges of a worker; a record has their sums, not means over time and workers."""
        if ACTORS in metrics:
            self._learner_metrics[index] = metrics

    def write(self, snapshot: Snapshot) -> Path | None:
        self.acting.before_write()
        path = self.core.hooks.save(snapshot)
        self.setup.published.set_saved_parts(self._answered_request)
        return path

    def _publish_member_steps(self) -> None:
        member_steps = self.acting.message_handler.member_steps
        if member_steps != self.setup.published.status.member_steps:
            self.setup.published.set_member_steps(member_steps)

    def _gauges(self) -> dict[str, float]:
        """Gauge: live workers, the actors of all of them, and the outcomes of pushed gradient slices."""
        self.acting.metrics()  # counts restarts
        now, live_s = time.monotonic(), self.setup.registry.live_s
        alive = [member.index for member in self.setup.registry.members()
                 if member.role == LEARNER and now - member.heard < live_s]
        values = {"server/learners": len(alive),
                  "server/stale_pushes": sum(status.stale for status in self._shard_status),
                  "server/refused_pushes": sum(status.refused for status in self._shard_status),
                  **dict.fromkeys(AGES, 0)}
        for status in self._shard_status:
            for age, count in status.staleness.items():
                values[next(tag for tag, end in AGES.items() if age < end)] += count
        actors = merge_actor_metrics(self._learner_metrics.get(index, {}) for index in alive)
        return actors | {tag: float(number) for tag, number in values.items()}
