"""Main function of the learner process: reads its request from the driver, trains, and writes its result."""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch

from qfleet.core.env import EnvSpec
from qfleet.launch.actor_node import heartbeat_thread
from qfleet.launch.actor_service import ActorService
from qfleet.launch.attempt import (
    FINAL_ERRORS,
    Attempt,
    TrainResult,
    advise_on_oom,
    describe_final_error,
    initial_weights,
)
from qfleet.launch.coordinator import ConnectShards, Coordinator, connect_shards
from qfleet.process.heartbeat import ORPHAN_GRACE_S, Heartbeat, HeartbeatSender
from qfleet.process.signals import exit_on_signal
from qfleet.process.supervisor import EXIT_UNRECOVERABLE
from qfleet.runconfig import resolution
from qfleet.runconfig.build import make_agent, make_plan
from qfleet.runconfig.run_config import RunConfig
from qfleet.runs.checkpoint import Checkpoints
from qfleet.runs.directory import RunDirectory, replace_text
from qfleet.runs.membership import live_actors
from qfleet.training.learner_core import Hooks
from qfleet.training.learner_run import LearnerRun
from qfleet.transport.fleet_server import FleetServer
from qfleet.transport.inbox import Inbox
from qfleet.transport.published_state import PublishedState
from qfleet.transport.registry import Registry
from qfleet.transport.security import read_token

log = logging.getLogger(__name__)

RECENTLY_SENT_S = 10.0
"""Seconds that an actor which was sent to a learner counts as one of its actors before the learner lists it."""


@dataclass(frozen=True)
class RunRequest:
    """Request of the driver to its learner process, as a file in their private folder."""

    directory: str
    spec: dict[str, Any]
    origin: dict[str, Any]

    REQUEST_FILE: ClassVar = "orders.json"
    RESULT_FILE: ClassVar = "result.json"
    ENDPOINT_FILE: ClassVar = "door.json"
    SOCKET_FILE: ClassVar = "fleet.sock"
    TOKEN_FILE: ClassVar = "token"  # of the run's own processes
    JOIN_TOKEN_FILE: ClassVar = "join-token"  # for joining members, if the config names no file

    def write(self, private: Path) -> None:
        replace_text(private / self.REQUEST_FILE, json.dumps(asdict(self)))

    @staticmethod
    def read(private: Path) -> RunRequest:
        return RunRequest(**json.loads((private / RunRequest.REQUEST_FILE).read_text()))


def run_learner(private: Path) -> int:
    """Main function: train until the run ends, and write the result to the private folder."""
    run_request, heartbeat = RunRequest.read(private), HeartbeatSender.from_env()
    try:
        # A signal before there is anything to save ends the process.
        with exit_on_signal(sys.exit), exclusive_writer(Path(run_request.directory)):
            learn(run_request, heartbeat, GrpcServing(private),
                  lambda config, wait: connect_shards(config, wait, private))
        return 0
    except FINAL_ERRORS as error:
        log.error("%s", describe_final_error(error))
        return EXIT_UNRECOVERABLE


class Serving(Protocol):
    """Serves the RPCs of members while the context is open, and reports the result of the run."""

    def __call__(self, published: PublishedState, registry: Registry, inbox: Inbox, config: RunConfig
                 ) -> AbstractContextManager[None]: ...
    def report_result(self, result: TrainResult) -> None: ...


class GrpcServing:
    """Serves by gRPC; port and result are written to the private folder.

    `index` is that of a learner with a service of its own, beside the run's main service (learner 0, or the
    coordinator), where joining actors register first. Its port is `offset` above the main one.
    """

    def __init__(self, private: Path, index: int | None = None, offset: int = 0) -> None:
        self._private, self._index, self._offset = private, index, offset

    @contextmanager
    def __call__(self, published: PublishedState, registry: Registry, inbox: Inbox,
                 config: RunConfig) -> Iterator[None]:
        private, endpoint_file = self._private, learner_endpoint(self._private, self._index)
        # Joined actors only know the port of a learner that died.
        fleet = config.fleet.with_offset(self._offset).at_port(_former_port(endpoint_file))
        divides = self._index is None and fleet.address is not None
        redirect = JoinedActorPorts(private, config) if divides else lambda name: 0
        server = FleetServer(published, registry, inbox, fleet, learner_socket(private, self._index),
                             _tokens(config, private), redirect)
        try:
            server.start()
            replace_text(endpoint_file, json.dumps({"port": server.port}))
            yield
        finally:
            server.close(1.0)

    def report_result(self, result: TrainResult) -> None:
        replace_text(self._private / RunRequest.RESULT_FILE, result_json(result))


def result_json(result: TrainResult) -> str:
    return json.dumps(asdict(result) | {"directory": str(result.directory)})


def learn(run_request: RunRequest, heartbeat: Heartbeat | None, serving: Serving,
          connect: ConnectShards | None = None) -> None:
    """Train until the run ends, and report the result.

    `connect` connects to the shards of a parameter server.
    """
    directory, spec = RunDirectory(Path(run_request.directory)), EnvSpec.from_json(run_request.spec)
    config = resolution.resolve(str(directory.config), []).config
    service = ActorService(config, spec, takes_experience=not config.has_server)
    published = service.published
    stall_s = config.run.stall_timeout_s
    # Loading and saving a replay takes long, so a thread beats; it stops if the main loop hangs.
    stop_heartbeat = heartbeat_thread(
        heartbeat, math.inf, lambda: time.monotonic() - published.status.updated_at < stall_s)
    checkpoint = Checkpoints(directory.checkpoints, config.checkpoint.keep).newest()

    def build(hooks: Hooks) -> LearnerRun | Coordinator:
        plan, setup = make_plan(config), service.setup(make_agent(config, spec))
        if connect is None or not config.has_server:
            return LearnerRun(setup, plan, hooks)
        plan = replace(plan, device=torch.device("cpu"))
        return Coordinator(setup, plan, hooks, partial(connect, config), config.learners, directory.path / "parts")

    with advise_on_oom(config), ExitStack() as stack:
        attempt = Attempt(config, spec, directory, (), build, checkpoint)
        stack.callback(attempt.close)
        if checkpoint is None and (source := initial_weights(config, spec)) is not None:
            attempt.load_initial_weights(source)
        resumed = {} if checkpoint is None else {"resumed_from": checkpoint.path.name}
        attempt.open(run_request.origin | resumed)
        stack.enter_context(serving(published, service.registry, service.inbox, config))
        if heartbeat is not None:
            heartbeat.on_orphan(lambda: attempt.core.stop.request("preempted"))
        stack.callback(stop_heartbeat.set)
        result = attempt.execute()
        serving.report_result(result)
        service.end()


@contextmanager
def exclusive_writer(run: Path) -> Iterator[None]:
    """Wait until no other process writes to the run: the learner of a killed driver may be saving its last checkpoint.

    The system releases the lock when its holder dies; on file systems without folder locks there is no wait.
    """
    fd = os.open(run, os.O_RDONLY)
    try:
        deadline = time.monotonic() + ORPHAN_GRACE_S + 2
        while time.monotonic() < deadline:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
            except OSError:
                break
        yield
    finally:
        os.close(fd)


def _tokens(config: RunConfig, private: Path) -> list[str]:
    """Token of the run's own processes, then that of joining members, if they can join."""
    own = read_token(private / RunRequest.TOKEN_FILE)
    if config.fleet.address is None:
        return [own]
    return [own, read_token(config.fleet.token_file or private / RunRequest.JOIN_TOKEN_FILE)]


def learner_socket(private: Path, index: int | None) -> Path:
    """Socket of a learner's own service; None: of the run's main service."""
    return private / (RunRequest.SOCKET_FILE if index is None else f"learner-{index}.sock")


def learner_endpoint(private: Path, index: int | None) -> Path:
    """File with the port of a service; None: of the run's main service."""
    return private / (RunRequest.ENDPOINT_FILE if index is None else f"learner-{index}.json")


def _former_port(endpoint_file: Path) -> int | None:
    try:
        port: int | None = json.loads(endpoint_file.read_text())["port"]
        return port
    except FileNotFoundError:
        return None


class JoinedActorPorts:
    """`Redirect` of the main service: sends a joining actor to the learner with the fewest actors.

    An actor that joins again, such as a restarted one, is sent to its former learner while that lists it. The lists
    of members in the run directory say which actors a learner has; those sent within the last seconds count, too.
    """

    def __init__(self, private: Path, config: RunConfig) -> None:
        self._private, self._config = private, config
        self._run = Path(RunRequest.read(private).directory)
        self._lock = threading.Lock()  # RPC threads call
        self._sent: dict[str, tuple[int, float]] = {}  # by name: learner and time

    def __call__(self, name: str) -> int | None:
        index = self._learner_of(name)
        if index == 0 and not self._config.has_server:
            return 0
        return _former_port(learner_endpoint(self._private, index))

    def _learner_of(self, name: str) -> int:
        now = time.monotonic()
        with self._lock:
            found = {name: index for name, (index, at) in self._sent.items() if now - at < RECENTLY_SENT_S}
            for index in range(self._config.learners):
                main = index == 0 and not self._config.has_server
                found |= dict.fromkeys(live_actors(self._run, None if main else index), index)
            if name not in found:
                sizes = Counter(found.values())
                found[name] = min(range(self._config.learners), key=lambda index: sizes[index])
                recent = [(old, sent) for old, sent in self._sent.items() if now - sent[1] < RECENTLY_SENT_S]
                self._sent = dict(recent[-(self._config.fleet.max_members - 1):])
                self._sent[name] = (found[name], now)
            return found[name]
