"""What the learning process of a fleet runs: it takes its orders from the head, and leaves word how it ended."""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch

from qfleet import recipe
from qfleet.assemble import make_agent, plan_of
from qfleet.bureau import Bureau, shelves_of
from qfleet.config import to_yaml
from qfleet.members import beating
from qfleet.roles.learner import Diverged
from qfleet.runs.checkpoint import Checkpoints
from qfleet.runs.directory import RunDirectory, replace_text
from qfleet.runtime.cell import Outside
from qfleet.runtime.fleet import Fleet
from qfleet.runtime.signals import heeded
from qfleet.runtime.supervise import VAIN
from qfleet.runtime.tether import ORPHAN_GRACE_S, Tether, Tie
from qfleet.runtime.wire.desk import Desk
from qfleet.runtime.wire.inbox import Inbox
from qfleet.runtime.wire.registry import Registry
from qfleet.runtime.wire.security import read_token
from qfleet.runtime.wire.server import Server
from qfleet.runtime.wire.shards import RemoteShard
from qfleet.session import Attempt, TrainResult, memory_advised, source_of_weights
from qfleet.settings import RunConfig
from qfleet.types import EnvSpec, RunLost

log = logging.getLogger(__name__)

FAREWELL_S = 3.0
"""How long a cell that is done waits until everybody has heard so."""


@dataclass(frozen=True)
class Orders:
    """What the head tells its cell, as a file in their private folder."""

    directory: str
    spec: dict[str, Any]
    origin: dict[str, Any]

    FILE: ClassVar = "orders.json"
    RESULT: ClassVar = "result.json"
    DOOR: ClassVar = "door.json"
    SOCKET: ClassVar = "fleet.sock"
    TOKEN: ClassVar = "token"  # of the run's own processes
    JOIN_TOKEN: ClassVar = "join-token"  # for members that join, where the config names no file

    def write(self, private: Path) -> None:
        replace_text(private / self.FILE, json.dumps(asdict(self)))

    @staticmethod
    def read(private: Path) -> Orders:
        return Orders(**json.loads((private / Orders.FILE).read_text()))


def run_cell(private: Path) -> int:
    """Learn until the run ends; how it ended is left in the private folder."""
    orders, tether = Orders.read(private), Tether.from_env()
    try:
        with heeded(sys.exit), sole_writer(Path(orders.directory)):  # told to stop before there is anything to save
            learn(orders, tether, Reception(private), lambda config: shelves_of(config, private))
        return 0
    except (Diverged, RunLost) as error:
        log.error("training failed: %s", error)  # here, where no restart would be of use
        return VAIN


class Open(Protocol):
    """How others come to a cell while the context is open, and whom it tells its result."""

    def __call__(self, desk: Desk, registry: Registry, inbox: Inbox, config: RunConfig
                 ) -> AbstractContextManager[None]: ...
    def tell(self, result: TrainResult) -> None: ...


class Reception:
    """Calls come by gRPC; what others must know lies in the private folder."""

    def __init__(self, private: Path) -> None:
        self._private = private

    @contextmanager
    def __call__(self, desk: Desk, registry: Registry, inbox: Inbox, config: RunConfig) -> Iterator[None]:
        private = self._private
        fleet = config.fleet.at_port(_former_port(private))  # of a cell that died: those who joined know no other
        server = Server(desk, registry, inbox, fleet, private / Orders.SOCKET, _tokens(config, private))
        try:
            server.start()
            replace_text(private / Orders.DOOR, json.dumps({"port": server.port}))
            yield
        finally:
            server.close(1.0)

    def tell(self, result: TrainResult) -> None:
        replace_text(self._private / Orders.RESULT, as_text(result))


def as_text(result: TrainResult) -> str:
    return json.dumps(asdict(result) | {"directory": str(result.directory)})


def learn(orders: Orders, tether: Tie | None, reception: Open,
          shelves: Callable[[RunConfig], list[RemoteShard]] | None = None) -> None:
    """Learn until the run ends; the reception hears how. `shelves` finds the shards of a parameter server."""
    directory, spec = RunDirectory(Path(orders.directory)), EnvSpec.from_json(orders.spec)
    config = recipe.resolve(str(directory.config), []).config
    desk = Desk(to_yaml(config), json.dumps(orders.spec), config.actors)
    registry = Registry(config.actors, config.fleet.heartbeat_timeout_s, config.fleet.max_members)
    if config.gradients != "server":
        shelves = None
    inbox = Inbox(config.fleet.inbox_messages, *([] if shelves else [config.waiting_steps(config.env.lanes)]))
    stall_s = config.run.stall_timeout_s
    # A replay takes long to load and to save; a loop that hangs for ever is another matter.
    over = beating(tether, math.inf, lambda: time.monotonic() - desk.facts.told_at < stall_s)
    checkpoint = Checkpoints(directory.checkpoints, config.checkpoint.keep).newest()

    def build(outside: Outside) -> Fleet | Bureau:
        plan = plan_of(config)
        if shelves is None:
            return Fleet(make_agent(config, spec), spec, plan, outside, desk, registry, inbox)
        plan = replace(plan, device=torch.device("cpu"), learner=plan.learner.model_copy(update={"parts": 1}))
        fleet = Fleet(make_agent(config, spec), spec, plan, outside, desk, registry, inbox)
        return Bureau(fleet, shelves(config), config.cells, directory.path / "parts")

    with memory_advised(config), ExitStack() as stack:
        attempt = Attempt(config, spec, directory, (), build, checkpoint)
        stack.callback(attempt.close)
        if checkpoint is None and (source := source_of_weights(config, spec)) is not None:
            attempt.begin_from(source)
        attempt.open(orders.origin if checkpoint is None else orders.origin | {"resumed_from": checkpoint.path.name})
        stack.enter_context(reception(desk, registry, inbox, config))
        if tether is not None:
            tether.on_orphan(lambda: setattr(attempt.cell.stop, "reason", "preempted"))
        stack.callback(over.set)
        result = attempt.execute()
        reception.tell(result)
        if not config.fleet.lasting:
            desk.stop()
        _farewell(registry)


@contextmanager
def sole_writer(run: Path) -> Iterator[None]:
    """Wait until nobody else writes here: the cell of a head that was killed may be saving its last checkpoint.

    The system lets go of the folder when its holder dies; where it cannot hold folders at all, nobody waits.
    """
    holder = os.open(run, os.O_RDONLY)
    try:
        deadline = time.monotonic() + ORPHAN_GRACE_S + 2
        while time.monotonic() < deadline:
            try:
                fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
            except OSError:
                break
        yield
    finally:
        os.close(holder)


def _tokens(config: RunConfig, private: Path) -> list[str]:
    """First that of the run's own processes, then that of members that join, if they can."""
    own = read_token(private / Orders.TOKEN)
    if config.fleet.address is None:
        return [own]
    return [own, read_token(config.fleet.token_file or private / Orders.JOIN_TOKEN)]


def _former_port(private: Path) -> int | None:
    try:
        port: int | None = json.loads((private / Orders.DOOR).read_text())["port"]
        return port
    except FileNotFoundError:
        return None


def _farewell(registry: Registry) -> None:
    """Everybody who asks now is told to leave; wait until those who were here a moment ago have asked."""
    ended = time.monotonic()
    while time.monotonic() - ended < FAREWELL_S:
        if all(member.heard > ended or ended - member.heard > FAREWELL_S for member in registry.members()):
            return
        time.sleep(0.05)
