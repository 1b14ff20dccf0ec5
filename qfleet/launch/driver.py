"""Driver of a run with several processes: prepares the run, starts and supervises its processes, shows their metrics.

    driver ──▶ learner (with replay, metrics, checkpoints)    the driver computes nothing itself, and displays the
           ──▶ actors, evaluator ──▶ learner                  metrics that it reads from the run directory
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

from qfleet.config import to_yaml
from qfleet.core.env import EnvSpec
from qfleet.core.errors import ProcessFault, UserError
from qfleet.launch.actor_node import GrpcEndpoint
from qfleet.launch.attempt import (
    EXIT_CODES,
    TrainResult,
    initial_weights,
    open_for_resume,
    record_outcome,
    require_same_env,
    show_plan,
)
from qfleet.launch.learner_node import RunRequest
from qfleet.process.handle import child_environment
from qfleet.process.signals import stop_on_signal
from qfleet.process.supervisor import ChildFailure, ChildSpec, RestartPolicy, Supervisor
from qfleet.runconfig.auto import resolve_auto
from qfleet.runconfig.build import make_env
from qfleet.runconfig.plan_text import describe_plan
from qfleet.runconfig.run_config import RunConfig
from qfleet.runs.checkpoint import Checkpoints
from qfleet.runs.directory import RunDirectory, default_name, describe_machine, replace_text
from qfleet.runs.find import foreign_names
from qfleet.runs.membership import record_exit
from qfleet.runs.presence import DirectoryGuard
from qfleet.runs.tail import MetricsTail
from qfleet.training.loop import drive, idle
from qfleet.training.meter import Sink
from qfleet.transport.address import Address, require_free
from qfleet.transport.security import read_token, server_credentials, write_token

log = logging.getLogger(__name__)

LEARNER = "learner"
GRACE_S = 5.0
TURN_S = 0.02
SILENCE_S = 60.0
"""Seconds without a new record after which, repeatedly, the user is notified."""

PRESENCE_S = 1.0
"""Period of the check that the run directory still exists."""

REBUILD_S = 120.0
"""Seconds that the process of an isolated environment may take to start."""

SIGNALS = {"interrupted": signal.SIGINT, "preempted": signal.SIGTERM}
SIGNALLED_EXIT_CODES = (-signal.SIGINT, -signal.SIGTERM, 130)
"""Exit codes of a learner that receives a signal before it installs its handlers."""


def start(config: RunConfig, sinks: Sequence[Sink], provenance: Mapping[str, str],
          driver_class: type[Driver] | None = None) -> TrainResult:
    """Train a new run in several processes, under a driver class."""
    spec = _env_spec(config)
    config = require_startable(resolve_auto(config, spec))
    initial_weights(config, spec)  # raises before the run directory is created
    with ExitStack() as stack:
        directory = RunDirectory.create(config.run, default_name(config.env.id, config.agent.algo, config.seed))
        stack.callback(directory.unlock)
        try:
            replace_text(directory.config, to_yaml(config))
            driver = (driver_class or Driver)(config, spec, directory, sinks, {"sources": dict(provenance)})
            return record_outcome(directory, driver.run)
        except BaseException as error:
            if not directory.metrics.exists() and not isinstance(error, ProcessFault):  # it names a log in there
                directory.discard()  # otherwise its name would stay taken by a run that never started
            raise


def resume(directory: RunDirectory, config: RunConfig, sinks: Sequence[Sink],
           driver_class: type[Driver] | None = None) -> TrainResult:
    """Continue a run in several processes from its newest valid checkpoint."""
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
        return record_outcome(directory, (driver_class or Driver)(config, spec, directory, sinks, {}).run)


def _env_spec(config: RunConfig) -> EnvSpec:
    with closing(make_env(config.env, 1)) as env:
        return env.spec


def require_startable(config: RunConfig) -> RunConfig:
    """Check settings that would otherwise only fail in a child process."""
    fleet = config.fleet
    if fleet.token_file is not None:
        read_token(fleet.token_file)
    if fleet.tls_cert is not None and fleet.tls_key is not None:
        server_credentials(fleet.tls_cert, fleet.tls_key, fleet.tls_ca)
    if fleet.address is not None:
        require_free(fleet.address)
    return config


def heartbeat_timeout_of(config: RunConfig) -> float:
    """Heartbeat timeout of an acting process.

    Longer if its environment is isolated, which replaces a hung one itself.
    """
    env = config.env
    return config.fleet.heartbeat_timeout_s + (env.step_timeout_s + REBUILD_S) * env.isolate


class Driver:
    """One attempt of a run with several processes.

    `reason` is set by a signal. The run ends when the child `main_child` ends.
    """

    main_child = LEARNER

    def __init__(self, config: RunConfig, spec: EnvSpec, directory: RunDirectory, sinks: Sequence[Sink],
                 origin: Mapping[str, Any]) -> None:
        self.config, self.directory, self.sinks = config, directory, sinks
        self.reason: str | None = None  # set by a signal
        self.plan_rows = [("run", str(directory.path)), *describe_plan(config, spec, directory.path)]
        self.private = self._make_private_folder()
        self.run_request = RunRequest(str(directory.path.resolve()), spec.to_json(), describe_machine() | dict(origin))
        self.run_request.write(self.private)
        write_token(self.private / RunRequest.TOKEN_FILE)
        write_token(self.private / RunRequest.JOIN_TOKEN_FILE)
        self.tail, self.presence = MetricsTail(directory.metrics), DirectoryGuard(directory)
        fleet = config.fleet
        policy = RestartPolicy(heartbeat_timeout_s=fleet.heartbeat_timeout_s, max_restarts=fleet.actor_restarts)
        self.supervisor = self._make_supervisor(policy)
        self._forwarded = self._invitation_shown = False
        self._last_record_at = self._last_notice_at = self._checked_at = time.monotonic()

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
            self._clean()
            for sink in self.sinks:
                sink.flush()
                sink.close()

    def step(self) -> bool:
        """Display new metrics, and forward a received signal."""
        if time.monotonic() - self._checked_at >= PRESENCE_S:
            self._checked_at = time.monotonic()
            self.presence.check()
        for record in self.tail.new_records():
            self._last_record_at = self._last_notice_at = time.monotonic()
            for sink in self.sinks:
                sink.write(record)
        if time.monotonic() - self._last_notice_at >= SILENCE_S:
            self._last_notice_at = time.monotonic()
            waited_s = self._last_notice_at - self._last_record_at
            show_plan(self.sinks, [("waiting", f"nothing new for {waited_s:.0f} s"), *(
                [] if self.config.fleet.local_actors else self._invitation())])
        if not self._invitation_shown and (self.private / RunRequest.ENDPOINT_FILE).exists():
            self._invitation_shown = True
            show_plan(self.sinks, self._invitation())
        if self.reason is not None and not self._forwarded:
            self._forwarded = self._forward_signal(SIGNALS[self.reason])
        return False

    def _is_over(self) -> bool:
        exited = self._ending and self.supervisor.pid(self.main_child) is None
        return exited or self.supervisor.failure is not None or self.supervisor.done(self.main_child)

    @property
    def _ending(self) -> bool:
        """True if a learner that exits now is not restarted: a signal was received, or it has reported its result."""
        return self.reason is not None or (self.private / RunRequest.RESULT_FILE).exists()

    def _make_private_folder(self) -> Path:
        return Path(tempfile.mkdtemp(prefix="qfleet-"))  # readable by its owner only

    def _clean(self) -> None:
        shutil.rmtree(self.private, ignore_errors=True)

    def _make_supervisor(self, policy: RestartPolicy) -> Supervisor:
        return Supervisor(self._children(), log.warning, policy, lambda name: None, self.private,
                          on_death=partial(record_exit, self.directory.path))

    def _forward_signal(self, number: signal.Signals) -> bool:
        pid = self._pid()
        if pid is not None:
            os.kill(pid, number)
        return pid is not None

    def _pid(self) -> int | None:
        return self.supervisor.pid(self.main_child)

    def _fail(self, failure: ChildFailure) -> None:
        """Let the learner save a checkpoint, then raise the failure."""
        if failure.name != self.main_child:
            self.supervisor.terminate(60.0)
        raise UserError(failure.text) if failure.code == 2 else ProcessFault(failure.text)

    def _result(self, failure: ChildFailure | None) -> TrainResult:
        try:
            data = json.loads((self.private / RunRequest.RESULT_FILE).read_text())
        except FileNotFoundError:  # stopped before the learner started, or it died while saving
            if (
                failure is not None
                and failure.code not in SIGNALLED_EXIT_CODES
                and (self.private / RunRequest.ENDPOINT_FILE).exists()
            ):
                raise ProcessFault(failure.text) from None
            checkpoint = Checkpoints(self.directory.checkpoints, self.config.checkpoint.keep).newest()
            step, updates = (checkpoint.manifest.step, checkpoint.manifest.updates) if checkpoint else (None, 0)
            reason = self.reason or "preempted"
            return TrainResult(self.directory.path, step or 0, updates, 0, 0.0, None, reason, EXIT_CODES[reason], step)
        return TrainResult(**data | {"directory": self.directory.path})

    def _children(self) -> list[ChildSpec]:
        logs = self.directory.path / "logs"
        argv = [sys.executable, "-m", "qfleet", "_member"]
        env = child_environment()
        fleet = self.config.fleet
        learner = ChildSpec(LEARNER, [*argv, LEARNER, str(self.private)], env, logs / "learner.log",
                            fleet.learner_restarts, "replay.capacity or learner.batch_size")
        local = [f"actor/{index}" for index in range(self.config.actors)] if fleet.local_actors else []
        members = [*(("actor", name, list[str]()) for name in local), ("evaluator", "evaluator", self._video_args())]
        return [
            learner,
            *(
                ChildSpec(
                    name, [*argv, role, *self._endpoint_of(name).to_argv(), *extra_args], env,
                    logs / f"{name.replace('/', '-')}.log",
                    silence_s=heartbeat_timeout_of(self.config))
                for role, name, extra_args in members
            ),
        ]

    def _video_args(self) -> list[str]:
        return ["--videos", str(self.directory.videos.resolve())] if self.config.eval.video_period else []

    def _endpoint_of(self, name: str) -> GrpcEndpoint:
        return GrpcEndpoint(
            f"unix:{self.private / RunRequest.SOCKET_FILE}", name, str(self.private / RunRequest.TOKEN_FILE),
            self.config.fleet.reconnect_timeout_s, siblings=max(1, self.config.actors))

    def _invitation(self) -> list[tuple[str, str]]:
        """Command by which other hosts join, if they can."""
        fleet = self.config.fleet
        if fleet.address is None or not (self.private / RunRequest.ENDPOINT_FILE).exists():
            return []
        port = json.loads((self.private / RunRequest.ENDPOINT_FILE).read_text())["port"]
        host = os.uname().nodename if fleet.address.is_wildcard else fleet.address.host
        argv = ["qfleet", "join", fleet.advertise or str(Address(host, port)),
                 "--token-file", fleet.token_file or str(self.private / RunRequest.JOIN_TOKEN_FILE)]
        if fleet.tls_cert:
            argv += ["--tls-ca", fleet.tls_cert]
        if fleet.tls_ca:
            argv += ["--tls-cert", "YOUR.pem", "--tls-key", "YOUR.key"]
        if not fleet.tls_cert and not fleet.address.is_loopback and foreign_names(self.config.model_dump(mode="json")):
            argv += ["--trust"]
        return [("join", shlex.join(argv))]
