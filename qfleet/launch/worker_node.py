"""Main function of a parameter-server worker: actors, learner and replay in one process.

A worker pushes gradients to the shards and pulls weights from them on its own schedule. It reports its progress to
the coordinator (see launch/coordinator.py), which returns the global step count, requests the worker's part of a
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

REPORT_S = 0.1
GAUGES_S = 1.0
PAUSE_S = 0.005


class RunEnded(Exception):
    """The run ended during a call to a shard."""


class CoordinatedStop(StopRule):
    """Stop rule of a worker: the run's clocks, a stop by the coordinator, or a signal."""

    def __init__(self, plan: TrainingPlan, run: SingleProcessRun, client: FleetClient) -> None:
        super().__init__(plan, run.core.progress)
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


class NoEvaluator:
    """Evaluator that does nothing, for runs that another process evaluates."""

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
    """Connects a worker's training loop to the coordinator.

    Reports progress; receives the global step count and checkpoint requests.
    """

    def __init__(self, run: SingleProcessRun, client: FleetClient, stop: CoordinatedStop, folder: Path) -> None:
        self.local_run, self.connection, self.index, self.stop = run, client.connection, client.index, stop
        self.stage = StagingArea(folder, client.index)
        self._written: tuple[int, set[str]] = (0, set())
        self._reported_at = self._gauged_at = 0.0
        self._reported_steps = self._base = 0

    def begin(self) -> None:
        """Set the global clock to the coordinator's at the hello, plus everything since."""
        clock, welcome = self.local_run.core.clock, self.connection.welcome
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
        self.local_run.core.clock.remote_steps = self._base + self.connection.remote_steps

    def report(self, with_gauges: bool = False) -> None:
        """Report new steps, episodes and metrics; gauges at most every `GAUGES_S`, unless `with_gauges`."""
        core, outbox = self.local_run.core, self.connection.metrics
        now = self._reported_at = time.monotonic()
        if with_gauges or (core.stop.reason is None and now - self._gauged_at >= GAUGES_S):
            self._gauged_at = now
            for gauge in core.gauges:
                core.meter.write(gauge())
        drained = core.meter.drain()
        for tag, (total, count) in drained["sums"].items():
            outbox.add(tag, total, count)
        for tag, by in drained["counters"].items():
            if by:
                outbox.count(tag, by)
        for ret, length in drained["episodes"]:
            outbox.episode(0, ret, length)
        if steps := core.clock.local_steps - self._reported_steps:
            self._reported_steps += steps
            outbox.count_steps(steps)

    def _send_checkpoint_part(self, save: int) -> None:
        """Send this worker's part of a checkpoint, then wait for the others'.

        It may be the last message of the run.
        """
        self.report(with_gauges=True)
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
            log.warning("this learner's part of a checkpoint could not be written (%s)", error)
        buffers = dict(self.local_run.core.learner.flat.net.named_buffers())
        self.connection.metrics.set_checkpoint_part(save, pack_state(_checkpoint_part(snapshot, self.index, buffers)),
                                                    [segment.name for segment in segments])
        while self.connection.requested_checkpoint == save and not self.stop.run_ended:
            since = time.monotonic()
            time.sleep(10 * PAUSE_S)
            self.connection.metrics.count("server/checkpoint_barrier_ms", round(1000 * (time.monotonic() - since)))


def _checkpoint_part(snapshot: Snapshot, index: int, buffers: Iterable[str]) -> dict[str, Any]:
    """State of this worker; the first one's target network and buffers stand for all."""
    learner = snapshot.state["learner"]
    common = {"target": learner["target"], "buffers": {name: learner["net"][name] for name in buffers}}
    return {name: snapshot.state[name] for name in PER_RANK_KEYS} | {"learner": {"rng": learner["rng"]} | (
        {} if index else common)}


def run_worker(endpoint: GrpcEndpoint) -> int:
    private = Path(parse_address(endpoint.address).path).parent
    return train_worker(
        endpoint, Path(RunRequest.read(private).directory), lambda config: connect_shards(config, private)
    )


def train_worker(endpoint: Endpoint, run: Path, shard_clients: Callable[[RunConfig], list[RemoteShard]]) -> int:
    """Act, train and push gradients until the run is over."""
    client = FleetClient(endpoint, LEARNER)
    client.on_orphan = lambda: setattr(client.connection, "patience_s", 1.0)  # the coordinator may still request a part
    config, directory = client.config, RunDirectory(run)
    torch.set_num_threads(config.run.threads or 1)
    try:
        with client.deregister_on_error(), advise_on_oom(config), _open_env(config) as env, ExitStack() as stack:
            client.require_spec(env.spec)
            checkpoint = Checkpoints(directory.checkpoints, config.checkpoint.keep).newest(set_aside=False)
            local_run, stop = _build_run(config, env, client, checkpoint is None, stack)
            coordinator_client = CoordinatorClient(local_run, client, stop, directory.path / "parts")
            _attach_to_server(config, local_run, client, shard_clients(config), stop)
            _restore(config, local_run, client, checkpoint)
            client.connection.start()
            coordinator_client.begin()
            local_run.extra_workers.append(coordinator_client)
            # The first update may take long, for capture and compilation, so a thread beats unless the loop hangs.
            stall_s = config.run.stall_timeout_s
            stack.callback(
                heartbeat_thread(client.heartbeat, math.inf, lambda: time.monotonic() - stop.asked_at < stall_s).set
            )
            with client.running():
                _work(local_run, coordinator_client, stop)
    except Diverged as error:
        log.error("training failed: %s", error)
        return EXIT_UNRECOVERABLE
    client.connection.close()  # progress after the last checkpoint need not be reported
    if client.connection.failed is not None:
        raise client.connection.failed
    return 0 if client.connection.stopped else EXIT_CODES["preempted"]


def _work(run: SingleProcessRun, coordinator_client: CoordinatorClient, stop: CoordinatedStop) -> None:
    try:
        run.run()
        coordinator_client.report(with_gauges=True)
        while not stop.run_ended:  # other workers are still training, or the coordinator is saving
            coordinator_client.step()
            time.sleep(PAUSE_S)
    except RunEnded:
        pass


@contextmanager
def _open_env(config: RunConfig) -> Iterator[VectorEnv]:
    env_config = _with_shared_cores(config).env
    with closing(make_env(env_config, config.env.lanes, stall_timeout_s=config.run.stall_timeout_s)) as env:
        yield env


def _with_shared_cores(config: RunConfig) -> RunConfig:
    """Config with the host's cores divided among the workers."""
    threads = config.env.threads or max(1, usable_cores() // config.learners)
    return config.model_copy(update={"env": config.env.model_copy(update={"threads": threads})})


def _build_run(config: RunConfig, env: VectorEnv, client: FleetClient, fresh: bool,
               stack: ExitStack) -> tuple[SingleProcessRun, CoordinatedStop]:
    """Build the roles of a worker.

    Workers draw from different seeds, and so do restarts without a checkpoint; the first process of worker 0 draws as
    a single-process run would.
    """
    setup = make_acting_setup(_with_shared_cores(config), env, client.index, evaluates=False)
    stack.callback(setup.close)
    plan = make_plan(config)
    seed = seed_for(plan.seed, "rank", client.index) if client.index else plan.seed
    if fresh and client.incarnation > 1:
        seed = seed_for(seed, "life", client.incarnation)
    never = {"period_steps": None, "period_updates": None}
    plan = replace(plan, seed=seed, stop_at=None, log_period_steps=0, log_period_updates=None,
                   checkpoint=plan.checkpoint.model_copy(update=never))
    hooks = Hooks((), lambda snapshot: None, lambda score, progress, weights: True, lambda sample, update: None)
    run = SingleProcessRun(setup, plan, hooks)
    run.evaluator = NoEvaluator(run.evaluator.policy)
    stop = run.core.stop = CoordinatedStop(plan, run, client)
    return run, stop


def _attach_to_server(
    config: RunConfig, run: SingleProcessRun, client: FleetClient, shard_clients: Sequence[RemoteShard],
    stop: CoordinatedStop) -> None:
    """Make the shards the owner of the learner's weights and of its update count."""
    learner = run.core.learner

    def wait(seconds: float) -> None:
        if stop.run_ended:
            raise RunEnded
        time.sleep(seconds)

    for shard in shard_clients:
        shard.wait = wait
    sync = ParameterServerSync(
        f"{client.connection.name}, life {client.incarnation}", shard_clients, config.parameter_server,
        run.core.meter, first=client.index == 0)
    learner.set_sync(sync)
    learner.next_update_count = sync.next_update_count
    learner.target.polyak_update(learner.flat)
    learner.updates = sync.updates
    if config.parameter_server.outlier_deviations is not None:
        learner.filter_outliers(config.parameter_server.outlier_deviations)
    run.core.gauges.append(sync.gauges)


def _restore(config: RunConfig, run: SingleProcessRun, client: FleetClient, checkpoint: Checkpoint | None) -> None:
    """Load this worker's part of the newest checkpoint, if there is one."""
    welcome = client.connection.welcome
    if checkpoint is None:
        run.core.republish()
        return
    state = checkpoint.state()
    net = state["learner"]["net"]
    state |= {"weights": {"version": welcome.updates, "state": net}, "evaluator": {}}
    restore_rank(run, state, checkpoint.segments(), client.index, config.learners, welcome.steps)
    learner = run.core.learner
    learner.updates = learner.next_update_count(learner.updates)
    run.core.republish()
