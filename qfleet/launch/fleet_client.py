"""A process that connects to a learner or coordinator: actor, evaluator, or worker of a parameter server."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from qfleet.actor.policy import Policy
from qfleet.config import parse_mapping, validate
from qfleet.core.env import EnvSpec
from qfleet.core.seeds import seed_for
from qfleet.launch.attempt import require_same_spaces
from qfleet.launch.endpoint import Endpoint
from qfleet.process.heartbeat import heartbeat_thread
from qfleet.process.memory import retain_freed_memory
from qfleet.process.signals import EXIT_CODES, exit_on_signal
from qfleet.runconfig.auto import acting_precision
from qfleet.runconfig.build import make_agent
from qfleet.runconfig.run_config import RunConfig
from qfleet.runs.checkpoint_parts import unpack_state
from qfleet.runs.find import acting_part, refuse_imports
from qfleet.training.loop import Worker, drive, idle
from qfleet.transport.client import FleetConnection
from qfleet.transport.fleet_pb2 import Welcome
from qfleet.transport.registry import LEARNER

log = logging.getLogger(__name__)

FLUSH_S = 2.0
BUILDING_S = 120.0
"""Seconds that building the environment and the network may take."""


class FleetClient:
    """A member process of a run: its connection, and the config received over it.

    Without a parent process it stops. With `orphan_patience_s` it waits at most so long for answers instead, since the
    fleet may still need it.
    """

    def __init__(self, endpoint: Endpoint, role: str, orphan_patience_s: float | None = None) -> None:
        self.heartbeat = endpoint.heartbeat()
        # The hello and building the environment may take long; later the main loop beats by itself.
        self._ready = heartbeat_thread(self.heartbeat, endpoint.patience_s + BUILDING_S)
        self.connection, welcome = _register(endpoint, role)
        where = f"the config of the fleet at {endpoint.address}"
        config = parse_mapping(welcome.config_yaml, where)
        if not endpoint.trusted:
            refuse_imports(config if role == LEARNER else acting_part(config), f"the fleet at {endpoint.address}",
                           "without TLS any member that knows the token could answer there")
        self.config = validate(RunConfig, config, where)
        self.spec = EnvSpec.from_json(json.loads(welcome.spec_json))
        self.index, self.incarnation = welcome.index, welcome.incarnation
        self._stop_requested = threading.Event()
        self.connection.stop_waiting_if(self.is_over)  # which also beats
        torch.set_num_threads(1)
        retain_freed_memory()
        if self.heartbeat is not None:
            self.heartbeat.on_orphan(
                self._stop_requested.set if orphan_patience_s is None
                else lambda: self.connection.shorten_patience(orphan_patience_s))

    def require_spec(self, spec: EnvSpec) -> None:
        require_same_spaces(f"the fleet at {self.connection.address} uses", self.spec, "on this host", spec)

    @contextmanager
    def deregister_on_error(self) -> Iterator[None]:
        """Deregister on an error; otherwise the member would count as alive until its heartbeat timeout."""
        try:
            yield
        except BaseException:
            self.connection.close()
            raise

    def restore_state(self, load: Callable[[Any], None]) -> None:
        """Load the state that the previous process of this index sent, if any; it may have used another explorer."""
        if not self.connection.welcome.memory:
            return
        try:
            load(unpack_state(self.connection.welcome.memory))
        except Exception as error:  # any member may have sent it: its contents must not end this process
            log.warning("the saved state of this member cannot be used (%s): starting without it", error)

    def policy(self, purpose: str, *index: int) -> Policy:
        agent = make_agent(self.config, self.spec)
        return Policy(agent, seed_for(self.config.seed, purpose, *index), torch.device("cpu"),
                      acting_precision(self.config))

    def run(self, *workers: Worker) -> int:
        """Run the workers until the run ends or this process is asked to exit; returns the exit code.

        Exiting before the end is not success: unless the supervisor asked for it, it starts a replacement.
        """
        with self.running():
            drive(workers, self.is_over, idle)
        self.connection.close(FLUSH_S)
        if self.connection.failed is not None:
            raise self.connection.failed
        return 0 if self.connection.stopped else EXIT_CODES["preempted"]

    @contextmanager
    def running(self) -> Iterator[None]:
        """While inside, `is_over` sends the heartbeats, and signals request a stop."""
        self.is_over()
        self._ready.set()
        with exit_on_signal(self._stop_requested.set):
            yield

    def is_over(self) -> bool:
        """True if the run is over or a stop was requested. Polled at every step, so it also sends the heartbeats."""
        if self.heartbeat is not None:
            self.heartbeat.beat()
        return self.connection.stopped or self.connection.failed is not None or self._stop_requested.is_set()


def _register(endpoint: Endpoint, role: str) -> tuple[FleetConnection, Welcome]:
    """Register with the learner of this process, which the one at the endpoint may name."""
    connection = endpoint.connect(role)
    welcome = connection.hello()
    if not welcome.redirect_port:
        return connection, welcome
    connection.close()
    connection = endpoint.at_port(welcome.redirect_port).connect(role)
    return connection, connection.hello()
