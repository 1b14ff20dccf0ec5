"""Main functions of parameter-server processes: shards, and workers with actors, learner and replay in one process.

A worker pushes gradients to the shards and pulls weights from them on its own schedule. It reports its progress to the
coordinator (see launch/coordinator.py), which returns the global step count, requests the worker's part of a
checkpoint, and ends the run.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from qfleet.accel.threads import usable_cores
from qfleet.actor.policy import Policy
from qfleet.core.env import VectorEnv
from qfleet.core.replay import Segment
from qfleet.core.seeds import seed_for
from qfleet.launch.actor_node import Endpoint, FleetClient, GrpcEndpoint, heartbeat_thread
from qfleet.launch.attempt import EXIT_CODES, advise_on_oom
from qfleet.launch.coordinator import connect_shards
from qfleet.launch.learner_node import RunRequest
from qfleet.learner.learner import Diverged
from qfleet.process.supervisor import EXIT_UNRECOVERABLE
from qfleet.runconfig.build import make_acting_setup, make_env, make_plan
from qfleet.runconfig.run_config import RunConfig
from qfleet.runs.checkpoint import Checkpoint, Checkpoints
from qfleet.runs.checkpoint_parts import StagingArea, pack_state
from qfleet.runs.directory import RunDirectory
from qfleet.sync.ps_client import ParameterServerSync
from qfleet.training.checkpointer import Snapshot
from qfleet.training.learner_core import Hooks
from qfleet.training.loop import StopRule, TrainingPlan
from qfleet.training.replica import PER_RANK_KEYS, rank_segment_name, restore_rank
from qfleet.training.single_process import SingleProcessRun
from qfleet.transport.address import parse_address
from qfleet.transport.registry import LEARNER
from qfleet.transport.shard_client import RemoteShard

log = logging.getLogger(__name__)

TALK_S = 0.1
GAUGES_S = 1.0
PAUSE_S = 0.005


class RunEnded(Exception):
    """The run ended while somebody was waited for."""


class CoordinatedStop(StopRule):
    """Ends with the run's clocks, or when the registrar, or whoever started this process, says so."""

    def __init__(self, plan: TrainingPlan, inline: SingleProcessRun, member: FleetClient) -> None:
        super().__init__(plan, inline.core.progress)
        self.member, self.epoch = member, member.connection.welcome.epoch
        self.asked_at = time.monotonic()

    @property
    def run_ended(self) -> bool:
        """Another registrar has taken over, and the run is back at its last checkpoint: so must we be."""
        self.asked_at = time.monotonic()
        return self.member.is_over() or self.member.connection.welcome.epoch != self.epoch

    def __call__(self) -> bool:
        if self.run_ended:
            self.reason = "preempted"
        return super().__call__()


class NoEvaluator:
    """In the place of an evaluator, where another process evaluates."""

    count = 0

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def step(self) -> bool:
        return False

    def evaluate(self) -> None: ...
    def resume(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class CoordinatorClient:
    """A worker between a cell and the registrar: tells what was done, hears how far the others are, obeys orders."""

    def __init__(self, inline: SingleProcessRun, member: FleetClient, stop: CoordinatedStop, folder: Path) -> None:
        self.local_run, self.connection, self.index, self.stop = inline, member.connection, member.index, stop
        self.stage = StagingArea(folder, member.index)
        self._written: tuple[int, set[str]] = (0, set())
        self._spoke_at = self._gauged_at = 0.0
        self._reported_steps = self._base = 0

    def begin(self) -> None:
        """From now on the run's clock is what the registrar knew when it greeted us, and what came on top of it."""
        clock, welcome = self.local_run.core.clock, self.connection.welcome
        self._reported_steps = clock.local_steps
        self._base = welcome.steps - clock.local_steps - welcome.elsewhere
        self._update_remote_steps()

    def step(self) -> bool:
        self._update_remote_steps()
        if time.monotonic() - self._spoke_at >= TALK_S:
            self.report()
        if self.connection.requested_checkpoint > self._written[0]:
            self._send_checkpoint_part(self.connection.requested_checkpoint)
        return False

    def _update_remote_steps(self) -> None:
        self.local_run.core.clock.remote_steps = self._base + self.connection.remote_steps

    def report(self, stand: bool = False) -> None:
        """Tell what is new; how things stand only now and then, unless `stand` asks for it."""
        cell, outbox = self.local_run.core, self.connection.metrics
        now = self._spoke_at = time.monotonic()
        if stand or (cell.stop.reason is None and now - self._gauged_at >= GAUGES_S):
            self._gauged_at = now
            for gauge in cell.gauges:
                cell.meter.write(gauge())
        handed = cell.meter.drain()
        for tag, (total, count) in handed["sums"].items():
            outbox.add(tag, total, count)
        for tag, by in handed["counters"].items():
            if by:
                outbox.count(tag, by)
        for ret, length in handed["episodes"]:
            outbox.episode(0, ret, length)
        if steps := cell.clock.local_steps - self._reported_steps:
            self._reported_steps += steps
            outbox.count_steps(steps)

    def _send_checkpoint_part(self, save: int) -> None:
        """Our part of a checkpoint; then wait until everybody has given theirs. It may be the last that is heard."""
        self.report(stand=True)
        snapshot = self.local_run.snapshot()
        segments = [
            Segment(rank_segment_name(self.index, segment.name), segment.blocks) for segment in snapshot.segments
        ]
        before, names = self._written
        self.stage.saved_names = names if before == self.connection.saved_checkpoint else set()
        self._written = (save, {segment.name for segment in segments})
        try:
            self.stage.write(segments)
        except OSError as error:
            log.warning("this cell's part of a checkpoint could not be written (%s)", error)
        buffers = dict(self.local_run.core.learner.flat.net.named_buffers())
        self.connection.metrics.set_checkpoint_part(save, pack_state(_checkpoint_part(snapshot, self.index, buffers)),
                                                    [segment.name for segment in segments])
        while self.connection.requested_checkpoint == save and not self.stop.run_ended:
            since = time.monotonic()
            time.sleep(10 * PAUSE_S)
            self.connection.metrics.count("server/hold_ms", round(1000 * (time.monotonic() - since)))


def _checkpoint_part(snapshot: Snapshot, index: int, buffers: Iterable[str]) -> dict[str, Any]:
    """What this cell remembers for itself; the first one's target network and running figures stand for all."""
    learner = snapshot.state["learner"]
    common = {"target": learner["target"], "buffers": {name: learner["net"][name] for name in buffers}}
    return {name: snapshot.state[name] for name in PER_RANK_KEYS} | {"learner": {"rng": learner["rng"]} | (
        {} if index else common)}


def run_worker(contact: GrpcEndpoint) -> int:
    private = Path(parse_address(contact.address).path).parent
    return train_worker(
        contact, Path(RunRequest.read(private).directory), lambda config: connect_shards(config, private)
    )


def train_worker(contact: Endpoint, run: Path, shard_clients: Callable[[RunConfig], list[RemoteShard]]) -> int:
    """Act, learn and push until the run is over."""
    member = FleetClient(contact, LEARNER)
    member.on_orphan = lambda: setattr(member.connection, "patience_s", 1.0)  # the registrar may still want our part
    config, directory = member.config, RunDirectory(run)
    torch.set_num_threads(config.run.threads or 1)
    try:
        with member.deregister_on_error(), advise_on_oom(config), _open_env(config) as env, ExitStack() as stack:
            member.require_spec(env.spec)
            checkpoint = Checkpoints(directory.checkpoints, config.checkpoint.keep).newest(set_aside=False)
            inline, stop = _build_run(config, env, member, checkpoint is None, stack)
            coordinator_client = CoordinatorClient(inline, member, stop, directory.path / "parts")
            _attach_to_server(config, inline, member, shard_clients(config), stop)
            _restore(config, inline, member, checkpoint)
            member.connection.start()
            coordinator_client.begin()
            inline.extra_workers.append(coordinator_client)
            # The first update may take long: code is recorded and compiled; a loop that hangs is another matter.
            stall_s = config.run.stall_timeout_s
            stack.callback(
                heartbeat_thread(member.heartbeat, math.inf, lambda: time.monotonic() - stop.asked_at < stall_s).set
            )
            with member.running():
                _work(inline, coordinator_client, stop)
    except Diverged as error:
        log.error("training failed: %s", error)
        return EXIT_UNRECOVERABLE
    member.connection.close()  # nobody has to hear what was done after the last checkpoint
    if member.connection.failed is not None:
        raise member.connection.failed
    return 0 if member.connection.stopped else EXIT_CODES["preempted"]


def _work(inline: SingleProcessRun, coordinator_client: CoordinatorClient, stop: CoordinatedStop) -> None:
    try:
        inline.run()
        coordinator_client.report(stand=True)
        while not stop.run_ended:  # the others are still at it, or the registrar has to save
            coordinator_client.step()
            time.sleep(PAUSE_S)
    except RunEnded:
        pass


@contextmanager
def _open_env(config: RunConfig) -> Iterator[VectorEnv]:
    with closing(make_env(_shared(config).env, config.env.lanes, stall_timeout_s=config.run.stall_timeout_s)) as env:
        yield env


def _shared(config: RunConfig) -> RunConfig:
    """Cells share the cores."""
    threads = config.env.threads or max(1, usable_cores() // config.cells)
    return config.model_copy(update={"env": config.env.model_copy(update={"threads": threads})})


def _build_run(config: RunConfig, env: VectorEnv, member: FleetClient, anew: bool,
               stack: ExitStack) -> tuple[SingleProcessRun, CoordinatedStop]:
    """The roles of a cell. Nothing is drawn from the same numbers in two cells, nor in two lives of one that begin
    without a checkpoint; the first life of the first cell draws as a run of one process would."""
    cast = make_acting_setup(_shared(config), env, member.index, judged=False)
    stack.callback(cast.close)
    plan = make_plan(config)
    seed = seed_for(plan.seed, "rank", member.index) if member.index else plan.seed
    if anew and member.incarnation > 1:
        seed = seed_for(seed, "life", member.incarnation)
    never = {"period_steps": None, "period_updates": None}
    plan = replace(plan, seed=seed, stop_at=None, log_period_steps=0, log_period_updates=None,
                   checkpoint=plan.checkpoint.model_copy(update=never))
    quiet = Hooks((), lambda snapshot: None, lambda score, progress, weights: True, lambda sample, update: None)
    inline = SingleProcessRun(cast, plan, quiet)
    inline.evaluator = NoEvaluator(inline.evaluator.policy)
    stop = inline.core.stop = CoordinatedStop(plan, inline, member)
    return inline, stop


def _attach_to_server(
    config: RunConfig, inline: SingleProcessRun, member: FleetClient, shard_clients: Sequence[RemoteShard],
    stop: CoordinatedStop) -> None:
    """The learner's weights are the server's from now on; so is its count of updates."""
    learner = inline.core.learner

    def wait(seconds: float) -> None:
        if stop.run_ended:
            raise RunEnded
        time.sleep(seconds)

    for shelf in shard_clients:
        shelf.wait = wait
    rule = ParameterServerSync(
        f"{member.connection.name}, life {member.incarnation}", shard_clients, config.server,
        inline.core.meter, first=member.index == 0)
    learner.set_sync(rule)
    learner.next_update_count = rule.next_update_count
    learner.target.polyak_update(learner.flat)
    learner.updates = rule.updates
    if config.server.outlier_deviations is not None:
        learner.filter_outliers(config.server.outlier_deviations)
    inline.core.gauges.append(rule.gauges)


def _restore(config: RunConfig, inline: SingleProcessRun, member: FleetClient, checkpoint: Checkpoint | None) -> None:
    """With our part of the newest checkpoint, as far as there is one."""
    welcome = member.connection.welcome
    if checkpoint is None:
        inline.core.republish()
        return
    state = checkpoint.state()
    net = state["learner"]["net"]
    state |= {"weights": {"version": welcome.updates, "state": net}, "evaluator": {}}
    restore_rank(inline, state, checkpoint.segments(), member.index, config.cells, welcome.steps)
    learner = inline.core.learner
    learner.updates = learner.next_update_count(learner.updates)
    inline.core.republish()
