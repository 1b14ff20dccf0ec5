"""The evaluator of a crew of ranks: a process of its own, which the first rank starts, looks after and listens to."""

from __future__ import annotations

import json
import logging
import shutil
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from qfleet.cellhost import Orders
from qfleet.config import to_yaml
from qfleet.members import Contact
from qfleet.runs.directory import RunDirectory
from qfleet.runtime.cell import Cell
from qfleet.runtime.fleet import Intake, await_evaluation
from qfleet.runtime.plan import rest
from qfleet.runtime.shares import Shares
from qfleet.runtime.supervise import Child, Patience, Supervisor
from qfleet.runtime.wire.config import FleetConfig
from qfleet.runtime.wire.desk import Desk
from qfleet.runtime.wire.inbox import Inbox
from qfleet.runtime.wire.registry import Registry
from qfleet.runtime.wire.security import read_token, write_token
from qfleet.runtime.wire.server import Server
from qfleet.settings import RunConfig
from qfleet.types import EnvSpec, ProcessFault

log = logging.getLogger(__name__)

NAME = "evaluator"
GRACE_S = 5.0


class Gallery:
    """Implements `rank.Bench`: training goes on while others watch. Only the last weights are waited for."""

    def __init__(self, config: RunConfig, spec: EnvSpec, cell: Cell, directory: RunDirectory) -> None:
        self.cell, fleet = cell, config.fleet
        self.private = Path(tempfile.mkdtemp(prefix="qfleet-"))
        token, socket = self.private / Orders.TOKEN, self.private / Orders.SOCKET
        write_token(token)
        self.desk = Desk(to_yaml(config), json.dumps(spec.to_json()), 0)
        self.registry = Registry(0, fleet.heartbeat_timeout_s)
        inbox = Inbox(fleet.inbox_messages)
        self.server = Server(self.desk, self.registry, inbox, FleetConfig(max_message_mb=fleet.max_message_mb), socket,
                             [read_token(token)])
        self.intake = Intake(cell, self.registry, inbox, Shares())
        films = ["--videos", str(directory.videos.resolve())] if config.eval.video_period else []
        contact = Contact(f"unix:{socket}", NAME, str(token), fleet.patience_s)
        child = Child(NAME, [sys.executable, "-m", "qfleet", "_member", NAME, *contact.words(), *films],
                      {"PYTHONUNBUFFERED": "1"}, directory.path / "logs" / f"{NAME}.log")
        patience = Patience(heartbeat_timeout_s=fleet.heartbeat_timeout_s, max_restarts=fleet.max_restarts)
        self.supervisor = Supervisor([child], log.warning, patience, lambda name: None, self.private)
        self._open = False

    def step(self) -> bool:
        """Hand out the newest weights if somebody took those before, and book what was judged."""
        self._serve(0)
        learner = self.cell.learner
        if self.desk.wanted and learner.updates > self.desk.bundle.version:
            self.desk.publish(learner.flat.state(), learner.updates)
        self.intake.step()
        return False

    def judge(self) -> None:
        """The last weights; waits for the score."""
        self.desk.publish(self.cell.learner.flat.state(), self.cell.learner.updates)
        await_evaluation(self.cell, self.intake, self.registry, self.desk, self._serve)

    def close(self) -> None:
        self.desk.stop()
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, self.private, ignore_errors=True)
            stack.callback(self.server.close, 0.0)
            stack.callback(self.supervisor.terminate, GRACE_S)

    def _serve(self, nap_s: float) -> None:
        self.desk.tell(*self.cell.progress(), "training")
        if not self._open:
            self._open = True
            self.server.start()
        self.supervisor.step()
        if self.supervisor.failure is not None:
            raise ProcessFault(self.supervisor.failure.text)
        if nap_s:
            rest(nap_s)
