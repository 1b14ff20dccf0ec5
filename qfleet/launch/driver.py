"""Driver of a run with several processes: starts and supervises its nodes by a launcher, and shows their metrics.

    topology(config) ──▶ nodes ──▶ Driver ──▶ Supervisor ──▶ Launcher.start(node)     local_launcher, ray_launcher

The driver computes nothing itself; it displays the metrics that it reads from the run directory.
"""

from __future__ import annotations

import json
import logging
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from itertools import count, groupby, islice
from typing import Any

from qfleet.config import to_yaml
from qfleet.core.env import EnvSpec
from qfleet.launch.allreduce_run import gradient_sync_builder
from qfleet.launch.attempt import (
    TrainResult,
    initial_weights,
    open_for_resume,
    record_outcome,
    require_same_env,
    show_plan,
)
from qfleet.launch.final_score import score_result
from qfleet.launch.launcher import Launcher, launcher_class
from qfleet.launch.new_run import new_run
from qfleet.launch.run_request import RunRequest
from qfleet.launch.topology import Node, Role, actor_node, topology, with_actors
from qfleet.process.handle import ChildSpec, ProcessHandle
from qfleet.process.restart_group import RestartGroup
from qfleet.process.signals import EXIT_CODES, stop_on_signal
from qfleet.process.supervisor import ChildFailure, RestartPolicy, Supervisor
from qfleet.runconfig.auto import resolve_auto
from qfleet.runconfig.build import make_env, require_callbacks
from qfleet.runconfig.plan_text import describe_plan
from qfleet.runconfig.run_config import RunConfig
from qfleet.runs.checkpoint import Checkpoints
from qfleet.runs.directory import RunDirectory, describe_machine, replace_text
from qfleet.runs.membership import record_exit
from qfleet.runs.presence import DirectoryGuard
from qfleet.runs.tail import MetricsTail
from qfleet.training.loop import drive, idle
from qfleet.training.meter import GuardedSink, Sink
from qfleet.transport.address import require_free
from qfleet.transport.security import read_token, server_credentials

log = logging.getLogger(__name__)

GRACE_S = 5.0
TURN_S = 0.02
SILENCE_S = 60.0
"""Seconds without a new record after which, repeatedly, the user is notified."""

PRESENCE_S = 1.0
"""Period of the check that the run directory still exists."""

RESIZE_S = 2.0
"""Period of asking how many actors fit."""

WAITING_S = 60.0
"""After so long without resources for a node the user is warned."""

SIGNALLED_EXIT_CODES = (-signal.SIGINT, -signal.SIGTERM, 130)
"""Exit codes of a learner that receives a signal before it installs its handlers."""


def start(config: RunConfig, sinks: Sequence[Sink], provenance: Mapping[str, str]) -> TrainResult:
    """Train a new run in several processes."""
    launcher_class(config).require()
    spec = _env_spec(config)
    config = require_startable(resolve_auto(config, spec))
    initial_weights(config, spec)  # raises before the run directory is created
    with new_run(config) as directory:
        replace_text(directory.config, to_yaml(config))
        return _run(config, spec, directory, sinks, {"sources": dict(provenance)})


def resume(directory: RunDirectory, config: RunConfig, sinks: Sequence[Sink]) -> TrainResult:
    """Continue a run in several processes from its newest valid checkpoint, with the configured numbers of nodes."""
    launcher_class(config).require()
    with ExitStack() as stack:
        checkpoint, finished = open_for_resume(directory, config, stack)
        if finished is not None:
            return finished
        spec = _env_spec(config)
        if checkpoint is not None:
            require_same_env(checkpoint, spec)
        config = require_startable(resolve_auto(config, spec))
        directory.ensure_id(None if checkpoint is None else checkpoint.manifest.run)  # restores a lost run.json
        replace_text(directory.config, to_yaml(config))
        return _run(config, spec, directory, sinks, {})


def _run(config: RunConfig, spec: EnvSpec, directory: RunDirectory, sinks: Sequence[Sink],
         origin: Mapping[str, Any]) -> TrainResult:
    """Train, and score the best policy unless a signal came, perhaps after the learner had finished."""
    driver = Driver(config, spec, directory, sinks, origin, launcher_class(config)(config, directory))
    result = record_outcome(directory, driver.run)
    return result if driver.reason is not None else score_result(result, config, sinks)


def _env_spec(config: RunConfig) -> EnvSpec:
    with closing(make_env(config.env, 1)) as env:
        return env.spec


def require_startable(config: RunConfig) -> RunConfig:
    """Check settings that would otherwise only fail in a child process."""
    fleet = config.fleet
    require_callbacks(config)
    if config.synchronous:
        gradient_sync_builder(config)
    if fleet.token_file is not None:
        read_token(fleet.token_file)
    if fleet.tls_cert is not None and fleet.tls_key is not None:
        server_credentials(fleet.tls_cert, fleet.tls_key, fleet.tls_ca)
    for offset in range(config.services):
        if (address := fleet.with_offset(offset).address) is not None:
            require_free(address)
    return config


class Driver:
    """One attempt of a run with several processes. `reason` is set by a signal.

    The run ends when the first node of the topology, or its group, ends.
    """

    def __init__(self, config: RunConfig, spec: EnvSpec, directory: RunDirectory, sinks: Sequence[Sink],
                 origin: Mapping[str, Any], launcher: Launcher) -> None:
        self.directory, self.sinks, self.launcher = directory, sinks, launcher
        self.guarded = [GuardedSink(sink) for sink in sinks]
        self.reason: str | None = None  # set by a signal
        try:
            request = RunRequest(str(directory.path.resolve()), spec.to_json(), describe_machine() | dict(origin))
            launcher.open(request, topology(config))
            if (room := launcher.room()) is not None:
                config = with_actors(config, room)
                replace_text(directory.config, to_yaml(config))
            self.config = config
            self.plan_rows = [("run", str(directory.path)), *describe_plan(config, spec, directory.path)]
            self.nodes: dict[str, list[Node]] = {  # by the name under which they are supervised
                name: list(nodes) for name, nodes in groupby(topology(config), lambda node: node.child_name)}
            self.main_child = next(iter(self.nodes))
            self.supervisor = self._make_supervisor()
            self.tail, self.presence = MetricsTail(directory.metrics), DirectoryGuard(directory)
            self.actors = ElasticActors(self) if room is not None else None
        except BaseException:
            launcher.close()
            raise
        self._forwarded = self._invitation_shown = False
        self._last_record_at = self._last_notice_at = self._checked_at = self._complete_at = time.monotonic()

    def run(self) -> TrainResult:
        """Run until the learner has ended in order; raises the error that prevented it."""
        try:
            show_plan(self.sinks, self.plan_rows)
            with stop_on_signal(self):
                drive([self.supervisor, self], self._is_over, lambda nap_s: idle(TURN_S))
            self.presence.check()  # a lost directory is the cause of further failures
            self.step()
            failure = self.supervisor.failure
            if failure is not None and not (self._ending and failure.name == self.main_child):
                self._fail(failure)
            return self._result(failure)
        except KeyboardInterrupt:  # the second one: do not wait
            self.supervisor.terminate(0.0)
            raise
        finally:
            self.supervisor.terminate(GRACE_S)
            self.launcher.close()
            for sink in self.guarded:
                sink.flush()
                sink.close()

    def step(self) -> bool:
        """Display new metrics, adapt the number of actors, and forward a received signal."""
        now = time.monotonic()
        if now - self._checked_at >= PRESENCE_S:
            self._checked_at = now
            self.presence.check()
            self._warn_of_missing(now)
        if self.actors is not None and self.reason is None:
            self.actors.step()
        for record in self.tail.new_records():
            self._last_record_at = self._last_notice_at = time.monotonic()
            for sink in self.guarded:
                sink.write(record)
        if now - self._last_notice_at >= SILENCE_S:
            self._last_notice_at = now
            show_plan(self.sinks, [("waiting", f"nothing new for {now - self._last_record_at:.0f} s"), *(
                [] if self.config.fleet.local_actors else self.launcher.invitation())])
        if not self._invitation_shown and self.launcher.has_started():
            self._invitation_shown = True
            show_plan(self.sinks, self.launcher.invitation())
        if self.reason is not None and not self._forwarded:
            self._forwarded = self.supervisor.request_stop(self.main_child)
        return False

    def child(self, nodes: Sequence[Node]) -> ChildSpec:
        """The supervised child that a node, or a group of nodes, is."""
        node = nodes[0]
        return ChildSpec(node.child_name, [], {}, node.log_path(self.directory.path), node.max_restarts,
                         node.memory_hint, node.heartbeat_timeout_s)

    def show(self, rows: list[tuple[str, str]]) -> None:
        show_plan(self.sinks, rows)

    def _is_over(self) -> bool:
        exited = self._ending and self.supervisor.pid(self.main_child) is None
        return exited or self.supervisor.failure is not None or self.supervisor.done(self.main_child)

    @property
    def _ending(self) -> bool:
        """True if a learner that exits now is not restarted: a signal was received, or it has reported its result."""
        return self.reason is not None or self.launcher.result() is not None

    def _make_supervisor(self) -> Supervisor:
        fleet = self.config.fleet
        policy = RestartPolicy(heartbeat_timeout_s=fleet.heartbeat_timeout_s, max_restarts=fleet.actor_restarts)
        return Supervisor([self.child(nodes) for nodes in self.nodes.values()], log.warning, policy,
                          self.launcher.folder, self._start, partial(record_exit, self.directory.path))

    def _start(self, child: ChildSpec, attempt: int, now: float) -> ProcessHandle:
        nodes = self.nodes[child.name]
        if nodes[0].group is None:
            return self.launcher.start(nodes[0], attempt, now, lambda: True)
        return RestartGroup([partial(self.launcher.start, node, attempt, now) for node in nodes], now)

    def _warn_of_missing(self, now: float) -> None:
        """Warn periodically about nodes that wait for resources of a cluster."""
        missing = [name for name in self.supervisor.names if self.supervisor.is_unreachable(name)]
        if not missing:
            self._complete_at = now
        elif now - self._complete_at >= WAITING_S:
            self._complete_at = now
            resources = self.nodes[missing[0]][0].resources
            log.warning("%s: no node has free resources for it, or its node is unreachable; it needs %s",
                        ", ".join(sorted(missing)),
                        ", ".join(f"{amount:g} {name}" for name, amount in resources.items()))

    def _fail(self, failure: ChildFailure) -> None:
        """Let the learner save a checkpoint, then raise the failure."""
        if failure.name != self.main_child:
            self.supervisor.terminate(60.0)
        raise failure.error()

    def _result(self, failure: ChildFailure | None) -> TrainResult:
        """The learner's result, with the reason of a received signal: the learner is asked to stop without one."""
        reason, text = self.reason, self.launcher.result()
        if text is not None:
            result = TrainResult.from_json(json.loads(text), self.directory.path)
            if reason is None or result.reason not in EXIT_CODES:
                return result
            return replace(result, reason=reason, exit_code=EXIT_CODES[reason] if result.exit_code != 1 else 1)
        # Stopped before the learner started, or it died while saving.
        if failure is not None and failure.code not in SIGNALLED_EXIT_CODES and self.launcher.has_started():
            raise failure.error()
        checkpoint = Checkpoints(self.directory.checkpoints, self.config.checkpoint.keep).newest()
        step, updates = (checkpoint.manifest.step, checkpoint.manifest.updates) if checkpoint else (None, 0)
        reason = reason or "preempted"
        return TrainResult(self.directory.path, step or 0, updates, 0, 0.0, None, reason, EXIT_CODES[reason], step)


class ElasticActors:
    """Adapts the number of actors to what a cluster has room for."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._leaving: set[str] = set()
        self._resized_at = time.monotonic()

    def step(self) -> bool:
        if time.monotonic() - self._resized_at >= RESIZE_S:
            self._resized_at = time.monotonic()
            room = self._driver.launcher.room()
            if room is not None:
                self._resize(room)
        return False

    def _resize(self, room: int) -> None:
        """Add or remove actors; if there are too many, unreachable ones are removed first."""
        driver, supervisor = self._driver, self._driver.supervisor
        present = {name: node.index for name in supervisor.names
                   for node in driver.nodes[name] if node.role is Role.ACTOR}
        self._leaving &= present.keys()
        staying = {index: name for name, index in present.items() if name not in self._leaving}
        if len(staying) != room:
            driver.show([("actors", f"{len(staying)}, the cluster has room for {room}")])
        free = (index for index in count() if index not in staying)
        for index in islice(free, max(0, room - len(staying))):
            if index not in present.values():  # otherwise it is reused once its actor has left
                node = actor_node(driver.config, index)
                driver.nodes[node.name] = [node]
                supervisor.add(driver.child([node]))
        for index in sorted(staying, key=lambda index: (supervisor.is_unreachable(staying[index]), index))[room:]:
            name = staying[index]
            self._leaving.add(name)
            supervisor.remove(name)
            if name not in supervisor.names:  # it was not running
                driver.launcher.release(driver.nodes[name][0])
