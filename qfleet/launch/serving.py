"""How learners and the coordinator serve their members by gRPC, and report the result of the run."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from qfleet.launch.run_request import RunRequest, former_port, learner_endpoint, learner_socket
from qfleet.launch.topology import actor_assignment
from qfleet.launch.train_result import TrainResult
from qfleet.runconfig.run_config import RunConfig
from qfleet.runs.directory import replace_text
from qfleet.runs.membership import live_actors
from qfleet.transport.fleet_server import FleetServer
from qfleet.transport.inbox import Inbox
from qfleet.transport.published_state import PublishedState
from qfleet.transport.registry import Registry
from qfleet.transport.security import read_token

RECENTLY_SENT_S = 10.0
"""Seconds that an actor which was sent to a learner counts as one of its actors before the learner lists it."""


class Serving(Protocol):
    """Answers the RPCs of members while the context is open; the function that it yields is called on every turn."""

    def __call__(self, published: PublishedState, registry: Registry, inbox: Inbox, config: RunConfig
                 ) -> AbstractContextManager[Callable[[], object] | None]: ...


class RunServing(Serving, Protocol):
    """`Serving` of a process that a driver started; it can also report the result of the run to the driver."""

    def report_result(self, result: TrainResult) -> None: ...


class GrpcServing:
    """Implements `RunServing` by gRPC; port and result are written to the private folder.

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
        fleet = config.fleet.with_offset(self._offset).at_port(former_port(endpoint_file))
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
    return json.dumps(result.to_json())


def _tokens(config: RunConfig, private: Path) -> list[str]:
    """Token of the run's own processes, then that of joining members, if they can join."""
    own = read_token(private / RunRequest.TOKEN_FILE)
    if config.fleet.address is None:
        return [own]
    return [own, read_token(config.fleet.token_file or private / RunRequest.JOIN_TOKEN_FILE)]


class JoinedActorPorts:
    """`Redirect` of the main service: sends a joining actor to the learner with the fewest actors.

    An actor that joins again, such as a restarted one, is sent to its former learner while that lists it. The lists
    of members in the run directory say which actors a learner has; those sent within the last seconds count, too.
    """

    def __init__(self, private: Path, config: RunConfig) -> None:
        self._private, self._assignment, self._max_members = private, actor_assignment(config), config.fleet.max_members
        self._run = RunRequest.read(private).run.path
        self._lock = threading.Lock()  # RPC threads call
        self._sent: dict[str, tuple[int, float]] = {}  # by name: learner and time

    def __call__(self, name: str) -> int | None:
        service = self._assignment.own_service(self._learner_of(name))
        return 0 if service is None else former_port(learner_endpoint(self._private, service))

    def _learner_of(self, name: str) -> int:
        now = time.monotonic()
        with self._lock:
            found = {name: index for name, (index, at) in self._sent.items() if now - at < RECENTLY_SENT_S}
            learners = range(self._assignment.learners)
            for index in learners:
                found |= dict.fromkeys(live_actors(self._run, self._assignment.own_service(index)), index)
            if name not in found:
                sizes = Counter(found.values())
                found[name] = min(learners, key=lambda index: sizes[index])
                recent = [(old, sent) for old, sent in self._sent.items() if now - sent[1] < RECENTLY_SENT_S]
                self._sent = dict(recent[-(self._max_members - 1):])
                self._sent[name] = (found[name], now)
            return found[name]
