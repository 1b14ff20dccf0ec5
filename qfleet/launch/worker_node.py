"""Main function of a parameter-server worker: actors, learner and replay in one process.

A worker pushes gradients to the shards and pulls weights from them on its own schedule. It reports its progress to
the coordinator (see launch/coordinator.py), which returns the global step count, requests the worker's part of a
checkpoint, and ends the run.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from qfleet.core.agent import ROW_MOMENTS
from qfleet.core.clock import Progress, RunClock
from qfleet.core.episode import Episode
from qfleet.core.replay import Segment
from qfleet.core.seeds import seed_for
from qfleet.launch.actor_service import ActorService
from qfleet.launch.attempt import advise_on_oom
from qfleet.launch.coordinator import OF_FIRST_WORKER, ConnectShards, connect_shards
from qfleet.launch.endpoint import Endpoint, GrpcEndpoint
from qfleet.launch.fleet_client import FleetClient
from qfleet.launch.learner_main import exit_code
from qfleet.launch.run_request import RunRequest
from qfleet.launch.serving import GrpcServing, Serving
from qfleet.launch.topology import actor_assignment
from qfleet.process.heartbeat import heartbeat_thread
from qfleet.process.signals import EXIT_CODES
from qfleet.process.supervisor import EXIT_OK
from qfleet.replay.store import ReplayStore
from qfleet.runconfig.build import make_acting_setup, make_agent, make_env, make_plan, with_env_threads
from qfleet.runconfig.run_config import RunConfig
from qfleet.runs.checkpoint import Checkpoint, Checkpoints
from qfleet.runs.checkpoint_parts import StagingArea, pack_state
from qfleet.runs.directory import RunDirectory
from qfleet.runs.membership import write_members_of
from qfleet.sync.ps_client import ParameterServerSync
from qfleet.training.checkpointer import Snapshot
from qfleet.training.evaluation import NoEvaluator
from qfleet.training.learner_core import SILENT_HOOKS, Components, LearnerCore
from qfleet.training.learner_part import learner_part, restore_learner, segment_name
from qfleet.training.learner_run import LearnerRun, RunSetup
from qfleet.training.local_actors import ActingSetup
from qfleet.training.loop import StopRule, TrainingPlan
from qfleet.training.meter import Meter
from qfleet.transport.address import parse_address
from qfleet.transport.registry import LEARNER
from qfleet.transport.shard_client import RemoteShard

log = logging.getLogger(__name__)

REPORT_S = 0.1
GAUGES_S = 1.0
PAUSE_S = 0.005
ORPHAN_PATIENCE_S = 1.0
"""Seconds that a worker without a parent process waits for the coordinator, which may still request its part."""


class RunEnded(Exception):
    """The run ended during a call to a shard."""


class CoordinatedStop(StopRule):
    """Stop rule of a worker: the run's clocks, a stop by the coordinator, or a signal."""

    def __init__(self, plan: TrainingPlan, progress: Callable[[], Progress], client: FleetClient) -> None:
        super().__init__(plan, progress)
        self.member, self.epoch = client, client.connection.welcome.epoch
        self.asked_at = time.monotonic()

    @property
    def run_ended(self) -> bool:
        """True if the run is over, or another coordinator has resumed it from its last checkpoint.

        In the second case this process must restart from that checkpoint as well.
        """
        self.asked_at = time.monotonic()
        return self.member.is_over() or self.member.connection.welcome.epoch != self.epoch

    def __call__(self) -> bool:
        if self.run_ended:
            self.reason = "preempted"
        return super().__call__()


class CoordinatorClient:
    """Connects a worker's training loop to the coordinator.

    Reports progress; receives the global step count and checkpoint requests. `snapshot` returns the worker's state.
    """

    def __init__(self, core: LearnerCore, client: FleetClient, stop: CoordinatedStop, folder: Path,
                 snapshot: Callable[[], Snapshot]) -> None:
        self.core, self.connection, self.index, self.stop = core, client.connection, client.index, stop
        self.snapshot = snapshot
        self.stage = StagingArea(folder, client.index)
        self._written: tuple[int, set[str]] = (0, set())
        self._reported_at = self._gauged_at = 0.0
        self._reported_steps = self._base = 0

    def begin(self) -> None:
        """Set the global clock to the coordinator's at the hello, plus everything since."""
        clock, welcome = self.core.clock, self.connection.welcome
        self._reported_steps = clock.local_steps
        self._base = welcome.steps - clock.local_steps - welcome.elsewhere
        self._update_remote_steps()

    def step(self) -> bool:
        self._update_remote_steps()
        if time.monotonic() - self._reported_at >= REPORT_S:
            self.report()
        if self.connection.requested_checkpoint > self._written[0]:
            self._send_checkpoint_part(self.connection.requested_checkpoint)
        return False

    def _update_remote_steps(self) -> None:
        self.core.clock.set_remote_steps(self._base + self.connection.remote_steps)

    def report(self, with_gauges: bool = False) -> None:
        """Report new steps, episodes and metrics; gauges at most every `GAUGES_S`, unless `with_gauges`."""
        core, outbox = self.core, self.connection.metrics
        now = self._reported_at = time.monotonic()
        if with_gauges or (core.stop.reason is None and now - self._gauged_at >= GAUGES_S):
            self._gauged_at = now
            for gauge in core.meter.gauges:
                core.meter.write(gauge())
        drained = core.meter.drain()
        for tag, (total, count) in drained["sums"].items():
            outbox.add(tag, total, count)
        for tag, by in drained["counters"].items():
            if by:
                outbox.count(tag, by)
        for fields in drained["episodes"]:
            outbox.episode(Episode(*fields))
        if steps := core.clock.local_steps - self._reported_steps:
            self._reported_steps += steps
            outbox.count_steps(steps)

    def _send_checkpoint_part(self, save: int) -> None:
        """Send this worker's part of a checkpoint, then wait for the others'.

        It may be the last message of the run.
        """
        self.report(with_gauges=True)
        snapshot = self.snapshot()
        segments = [
            Segment(segment_name(self.index, segment.name), segment.blocks) for segment in snapshot.segments
        ]
        before, names = self._written
        self.stage.set_saved(names if before == self.connection.saved_checkpoint else ())
        self._written = (save, {segment.name for segment in segments})
        try:
            self.stage.write(segments)
        except OSError as error:
            log.warning("this learner's part of a checkpoint could not be written (%s)", error)
        self.connection.metrics.set_checkpoint_part(save, pack_state(self._part(snapshot)),
                                                    [segment.name for segment in segments])
        while self.connection.requested_checkpoint == save and not self.stop.run_ended:
            since = time.monotonic()
            time.sleep(10 * PAUSE_S)
            self.connection.metrics.count("server/checkpoint_barrier_ms", round(1000 * (time.monotonic() - since)))

    def _part(self, snapshot: Snapshot) -> dict[str, Any]:
        """State of this worker; the first one's target network and buffers stand for all.

        Running statistics of rows are those of the first shard, which has the rows of all learners.
        """
        if self.index:
            return learner_part(snapshot.state)
        learner = snapshot.state["learner"]
        buffers = {name: learner["net"][name] for name, _ in self.core.learner.flat.net.named_buffers()
                   if name not in ROW_MOMENTS}
        return learner_part({**snapshot.state, "learner": {**learner, "buffers": buffers}}, OF_FIRST_WORKER)


class WorkerRun(LearnerRun):
    """A `LearnerRun` that pushes gradients to the shards and reports to the coordinator, which saves and evaluates.

    `stop` reads `clock`. `shard_clients` own the weights of the learner and its update count.
    """

    def __init__(self, setup: RunSetup, config: RunConfig, plan: TrainingPlan, client: FleetClient, clock: RunClock,
                 stop: CoordinatedStop, shard_clients: Sequence[RemoteShard], directory: RunDirectory) -> None:
        server, name = config.parameter_server, f"{client.connection.name}, life {client.incarnation}"

        def make_sync(replay: ReplayStore[Any], meter: Meter) -> ParameterServerSync:
            return ParameterServerSync(name, shard_clients, server, meter, first=client.index == 0,
                                       row_moments=lambda: self.core.learner.row_moments)

        super().__init__(
            setup, plan, replace(SILENT_HOOKS, write_members=partial(write_members_of, directory.path, client.index)),
            Components(clock, stop, make_sync, outlier_deviations=server.outlier_deviations),
            lambda evaluator, core: NoEvaluator())
        sync = self.core.learner.gradient_sync
        assert isinstance(sync, ParameterServerSync)
        self.core.meter.add_gauge(sync.gauges)
        self.learners, self.client = actor_assignment(config).learners, client
        self.coordinator = CoordinatorClient(self.core, client, stop, directory.path / "parts", self.snapshot)
        self.workers = [self.coordinator]

    def restore_part(self, checkpoint: Checkpoint | None) -> None:
        """Load this worker's part of the newest checkpoint, if there is one."""
        if checkpoint is not None:
            welcome, state = self.client.connection.welcome, checkpoint.state()
            state |= {"weights": {"version": welcome.updates, "state": state["learner"]["net"]}}
            restore_learner(self.core, self.restore, state, checkpoint.segments(), self.client.index, self.learners,
                         welcome.steps)
        self.core.republish()

    def work(self) -> None:
        """Train until the run is over, and serve the coordinator until it ends the run."""
        try:
            self.run()
            self.coordinator.report(with_gauges=True)
            while not self.coordinator.stop.run_ended:  # other workers are training, or the coordinator is saving
                self.coordinator.step()
                time.sleep(PAUSE_S)
        except RunEnded:
            pass


def run_worker(endpoint: GrpcEndpoint) -> int:
    """Main function of a worker on this host."""
    private, index = Path(parse_address(endpoint.address).path).parent, int(endpoint.name.removeprefix("learner/"))
    return serve_worker(endpoint, RunRequest.read(private).run, connect_shards(private),
                        GrpcServing(private, index, index + 1), log.error)


def serve_worker(endpoint: Endpoint, directory: RunDirectory, connect: ConnectShards, serving: Serving,
                 report_error: Callable[[str], object]) -> int:
    """Train and push gradients until the run is over; returns the exit code. `serving` serves the worker's actors."""
    return exit_code(lambda: _train(endpoint, directory, connect, serving), report_error)


def _train(endpoint: Endpoint, directory: RunDirectory, connect: ConnectShards, serving: Serving) -> int:
    client = FleetClient(endpoint, LEARNER, ORPHAN_PATIENCE_S)
    config = client.config
    torch.set_num_threads(config.run.threads or 1)
    with client.deregister_on_error(), advise_on_oom(config), ExitStack() as stack:
        service = None if config.learners_act else ActorService(config, client.spec, client.index)
        setup = _acting_setup(config, client, stack) if service is None else service.setup(
            make_agent(config, client.spec), ends_members=False)
        worker = _build(config, setup, client, directory, connect)
        client.connection.start()
        worker.coordinator.begin()
        # The first update may take long, for capture and compilation, so a thread beats unless the loop hangs.
        stall_s, stop = config.run.stall_timeout_s, worker.coordinator.stop
        stack.callback(
            heartbeat_thread(client.heartbeat, math.inf, lambda: time.monotonic() - stop.asked_at < stall_s).set
        )
        if service is not None:
            stack.enter_context(serving(service.published, service.registry, service.inbox, config))
        with client.running():
            worker.work()
            if service is not None and client.connection.stopped:  # the run has ended, not only this process
                service.published.stop()
                service.end()
    client.connection.close()  # progress after the last checkpoint need not be reported
    if client.connection.failed is not None:
        raise client.connection.failed
    return EXIT_OK if client.connection.stopped else EXIT_CODES["preempted"]


def _acting_setup(config: RunConfig, client: FleetClient, stack: ExitStack) -> ActingSetup:
    """Environments of a worker that acts; the stack closes them."""
    config = with_env_threads(config)
    env = make_env(config.env, config.env.lanes, stall_timeout_s=config.run.stall_timeout_s)
    stack.callback(env.close)
    client.require_spec(env.spec)
    setup = make_acting_setup(config, env, client.index, evaluates=False)
    stack.callback(setup.close)
    return setup


def _build(config: RunConfig, setup: RunSetup, client: FleetClient, directory: RunDirectory,
           connect: ConnectShards) -> WorkerRun:
    """A worker with its part of the newest checkpoint."""
    checkpoint = Checkpoints(directory.checkpoints, config.checkpoint.keep).newest(set_aside=False)
    plan, clock = _worker_plan(config, client, checkpoint is None), RunClock()
    stop = CoordinatedStop(plan, clock.progress, client)

    def wait(seconds: float) -> None:
        if stop.run_ended:
            raise RunEnded
        time.sleep(seconds)

    shard_clients = connect(config, wait)
    worker = WorkerRun(setup, config, plan, client, clock, stop, shard_clients, directory)
    worker.restore_part(checkpoint)
    return worker


def _worker_plan(config: RunConfig, client: FleetClient, fresh: bool) -> TrainingPlan:
    """Plan of a worker: without log periods, checkpoints and `stop_at`, which are the coordinator's.

    Workers draw from different seeds, and so do restarts without a checkpoint; the first process of worker 0 draws as
    a single-process run would.
    """
    plan = make_plan(config)
    seed = seed_for(plan.seed, "rank", client.index) if client.index else plan.seed
    if fresh and client.incarnation > 1:
        seed = seed_for(seed, "life", client.incarnation)
    never = {"period_steps": None, "period_updates": None}
    return replace(plan, seed=seed, stop_at=None, log_period_steps=0, log_period_updates=None,
                   checkpoint=plan.checkpoint.model_copy(update=never))
