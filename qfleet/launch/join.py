"""Actors of this host for a fleet that runs elsewhere: the same processes as the head starts, over TCP."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from qfleet.core.errors import ProcessFault, UserError
from qfleet.launch.actor_node import GrpcEndpoint
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
"""Long enough for an isolated environment to be found hanging and replaced: what the fleet allows is not known here."""


class JoinedActors:
    """N actors, kept alive until the fleet says that its run is over or somebody asks them to leave."""

    def __init__(self, contact: GrpcEndpoint, actors: int) -> None:
        self.reason: str | None = None  # set by a signal
        self.logs = Path(tempfile.mkdtemp(prefix="qfleet-join-"))
        claim = write_token(self.logs / "claim")  # the names are ours as long as this process lives
        members = [replace(contact, name=claimed_name(os.uname().nodename, claim, index), siblings=actors,
                           claim_file=str(self.logs / "claim")) for index in range(actors)]
        words = [sys.executable, "-m", "qfleet", "_member", "actor"]
        children = [ChildSpec(member.name, [*words, *member.to_argv()], child_environment(),
                              self.logs / f"actor-{index}.log") for index, member in enumerate(members)]
        patience = RestartPolicy(heartbeat_timeout_s=SILENCE_S)
        self.supervisor = Supervisor(children, log.warning, patience, lambda name: None, self.logs)

    def run(self) -> str | None:
        """Until it is over; the reason if we were told to leave."""
        try:
            with stop_on_signal(self):
                drive([self.supervisor], lambda: self.reason is not None or self.supervisor.failure is not None
                      or self.supervisor.finished, lambda nap_s: idle(TURN_S))
        finally:
            self.supervisor.terminate(GRACE_S)
        failure = self.supervisor.failure
        if failure is not None and self.reason is None:
            raise UserError(failure.text) if failure.code == 2 else ProcessFault(failure.text)
        shutil.rmtree(self.logs, ignore_errors=True)
        return self.reason


def probe(contact: GrpcEndpoint) -> None:
    """See whether the fleet is there and knows us, before any process is started; a fleet may also come later."""
    why = probe_error(parse_address(contact.address), read_token(contact.token_file), contact.credentials())
    if why is not None:
        log.warning("nobody answers at %s yet (%s); the actors will ask for %.0f s", contact.address, why,
                    contact.patience_s)
