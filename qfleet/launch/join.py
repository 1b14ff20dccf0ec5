"""Actors on this host for a run on another host: the same processes that the driver starts, connected over TCP."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from qfleet.launch.endpoint import GrpcEndpoint
from qfleet.process.handle import child_environment
from qfleet.process.signals import stop_on_signal
from qfleet.process.supervisor import ChildSpec, RestartPolicy, Supervisor
from qfleet.training.loop import drive, idle
from qfleet.transport.address import parse_address
from qfleet.transport.grpc_channel import probe_error
from qfleet.transport.security import claimed_name, read_token, write_token

log = logging.getLogger(__name__)

GRACE_S = 5.0
TURN_S = 0.02
SILENCE_S = 210.0
"""Heartbeat timeout, long enough to replace an isolated environment: the run's own setting is not known here."""


class JoinedActors:
    """N supervised actors that run until the run ends or a signal arrives."""

    def __init__(self, endpoint: GrpcEndpoint, actors: int) -> None:
        self.reason: str | None = None  # set by a signal
        self.logs = Path(tempfile.mkdtemp(prefix="qfleet-join-"))
        claim = write_token(self.logs / "claim")  # proves that this process owns the names
        endpoints = [replace(endpoint, name=claimed_name(os.uname().nodename, claim, index), siblings=actors,
                           claim_file=str(self.logs / "claim")) for index in range(actors)]
        argv = [sys.executable, "-m", "qfleet", "_member", "actor"]
        children = [ChildSpec(actor.name, [*argv, *actor.to_argv()], child_environment(),
                              self.logs / f"actor-{index}.log") for index, actor in enumerate(endpoints)]
        policy = RestartPolicy(heartbeat_timeout_s=SILENCE_S)
        self.supervisor = Supervisor(children, log.warning, policy, self.logs)

    def run(self) -> str | None:
        """Run until the end; returns the reason if a signal stopped it."""
        try:
            with stop_on_signal(self):
                drive([self.supervisor], lambda: self.reason is not None or self.supervisor.failure is not None
                      or self.supervisor.finished, lambda nap_s: idle(TURN_S))
        finally:
            self.supervisor.terminate(GRACE_S)
        failure = self.supervisor.failure
        if failure is not None and self.reason is None:
            raise failure.error()
        shutil.rmtree(self.logs, ignore_errors=True)
        return self.reason


def probe(endpoint: GrpcEndpoint) -> None:
    """Check the connection and the token before any process is started.

    No answer is a warning: the run may start later.
    """
    reason = probe_error(parse_address(endpoint.address), read_token(endpoint.token_file), endpoint.credentials())
    if reason is not None:
        log.warning("no answer from %s yet (%s); the actors will retry for %.0f s", endpoint.address, reason,
                    endpoint.patience_s)
