"""What the processes of a fleet run: the cell that learns, the actors, the evaluator. Each re-enters through the CLI.

An actor or evaluator knows nothing but where its fleet is: config and environment come with the welcome.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from qfleet import recipe
from qfleet.assemble import acting_precision, layout_of, make_agent, make_env, make_explorer, make_judge, plan_of
from qfleet.config import parse_mapping, to_yaml, validate
from qfleet.films import Films
from qfleet.roles.actor import Actor, Recorder
from qfleet.roles.evaluator import Evaluator, Score
from qfleet.roles.learner import Diverged
from qfleet.roles.policy import Policy
from qfleet.roles.seeds import lane_seeds, seed_for
from qfleet.runs.checkpoint import Checkpoints
from qfleet.runs.directory import RunDirectory, replace_text
from qfleet.runtime.cell import Outside
from qfleet.runtime.fleet import Fleet
from qfleet.runtime.memory import keep_pages
from qfleet.runtime.plan import Worker, drive, rest
from qfleet.runtime.signals import heeded
from qfleet.runtime.supervise import VAIN
from qfleet.runtime.tether import ORPHAN_GRACE_S, Tether
from qfleet.runtime.threads import usable_cores
from qfleet.runtime.wire.address import parse_address
from qfleet.runtime.wire.client import Link
from qfleet.runtime.wire.desk import Desk
from qfleet.runtime.wire.inbox import Inbox
from qfleet.runtime.wire.registry import Registry
from qfleet.runtime.wire.security import ChannelCredentials, channel_credentials, read_token
from qfleet.runtime.wire.server import Server
from qfleet.session import EXIT_CODES, Attempt, memory_advised, require_same_spaces, source_of_weights
from qfleet.settings import RunConfig
from qfleet.types import EnvSpec

log = logging.getLogger(__name__)

FLUSH_S = 2.0
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
    TOKEN: ClassVar = "token"

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
            return _learn(orders, private, tether)
    except Diverged as error:
        log.error("training failed: %s", error)  # here, where no restart would be of use
        return VAIN


def _learn(orders: Orders, private: Path, tether: Tether | None) -> int:
    directory, spec = RunDirectory(Path(orders.directory)), EnvSpec.from_json(orders.spec)
    config = recipe.resolve(str(directory.config), []).config
    checkpoint = Checkpoints(directory.checkpoints, config.checkpoint.keep).newest()
    desk = Desk(to_yaml(config), json.dumps(orders.spec), config.actors)
    registry = Registry(config.actors, config.fleet.heartbeat_timeout_s)
    inbox = Inbox(config.fleet.inbox_messages, config.env.lanes * config.replay.chunk_steps // 8)

    def build(outside: Outside) -> Fleet:
        return Fleet(make_agent(config, spec), spec, plan_of(config), outside, desk, registry, inbox)

    attempt = Attempt(config, spec, directory, (), build, checkpoint)
    if checkpoint is None and (source := source_of_weights(config, spec)) is not None:
        attempt.begin_from(source)
    attempt.open(orders.origin if checkpoint is None else orders.origin | {"resumed_from": checkpoint.path.name})
    server = Server(desk, registry, inbox, config.fleet, private / Orders.SOCKET, _tokens(config, private))
    with memory_advised(config), closing(attempt), ExitStack() as stack:
        stack.callback(server.close, 1.0)
        server.start()
        replace_text(private / Orders.DOOR, json.dumps({"port": server.port}))
        if tether is not None:
            tether.on_orphan(lambda: setattr(attempt.cell.stop, "reason", "preempted"))
            stack.callback(_beating(tether, desk, config.run.stall_timeout_s).set)
        result = attempt.execute()
        replace_text(private / Orders.RESULT, json.dumps(asdict(result) | {"directory": str(result.directory)}))
        _farewell(registry)
    return 0


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
    own = read_token(private / Orders.TOKEN)
    return [own] if config.fleet.token_file is None else [own, read_token(config.fleet.token_file)]


def _beating(tether: Tether, desk: Desk, stall_timeout_s: float) -> threading.Event:
    """Show life from a thread of its own, for a checkpoint may take minutes; not for a loop that hangs for ever."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(0.5):
            if time.monotonic() - desk.facts.told_at < stall_timeout_s:
                tether.beat()

    threading.Thread(target=beat, name="beat", daemon=True).start()
    return over


def _farewell(registry: Registry) -> None:
    """Everybody who asks now is told to leave; wait until those who were here a moment ago have asked."""
    ended = time.monotonic()
    while time.monotonic() - ended < FAREWELL_S:
        if all(member.heard > ended or ended - member.heard > FAREWELL_S for member in registry.members()):
            return
        time.sleep(0.05)


@dataclass(frozen=True)
class Contact:
    """Where a fleet is, and by what it knows its own."""

    address: str
    name: str
    token_file: str
    patience_s: float = 600.0
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None

    def credentials(self) -> ChannelCredentials | None:
        return None if self.tls_ca is None else channel_credentials(self.tls_ca, self.tls_cert, self.tls_key)

    def link(self, role: str) -> Link:
        return Link(parse_address(self.address), read_token(self.token_file), self.name, role, self.patience_s,
                    self.credentials())

    def words(self) -> list[str]:
        """The same on a command line."""
        given = {"--token-file": self.token_file, "--patience": f"{self.patience_s:g}", "--tls-ca": self.tls_ca,
                 "--tls-cert": self.tls_cert, "--tls-key": self.tls_key}
        return [self.address, self.name, *(word for key, value in given.items() if value for word in (key, value))]


class Member:
    """A process that takes part in somebody's run: its line, and the config that came over it."""

    def __init__(self, contact: Contact, role: str) -> None:
        self.tether = Tether.from_env()
        self.link = contact.link(role)
        welcome = self.link.hello()
        where = f"the config of the fleet at {contact.address}"
        self.config = validate(RunConfig, parse_mapping(welcome.config_yaml, where), where)
        self.spec = EnvSpec.from_json(json.loads(welcome.spec_json))
        self.index, self.incarnation = welcome.index, welcome.incarnation
        self._told = threading.Event()
        torch.set_num_threads(1)
        keep_pages()
        if self.tether is not None:
            self.tether.on_orphan(self._told.set)

    def require(self, spec: EnvSpec) -> None:
        require_same_spaces(f"the fleet at {self.link.address} plays", self.spec, "on this host", spec)

    def policy(self, purpose: str, *index: int) -> Policy:
        agent = make_agent(self.config, self.spec)
        return Policy(agent, seed_for(self.config.seed, purpose, *index), torch.device("cpu"),
                      acting_precision(self.config))

    def play(self, *workers: Worker) -> int:
        """Work until the fleet says that it is over, or this process is told to leave; the exit code.

        Who left before the end is not done: unless our supervisor asked us to, it starts another in our place.
        """
        with heeded(self._told.set):
            drive(workers, self.over, rest)
        self.link.close(FLUSH_S)
        if self.link.failed is not None:
            raise self.link.failed
        return 0 if self.link.stopped else EXIT_CODES["preempted"]

    def over(self) -> bool:
        """Asked at every turn, and by an evaluation at every step: a good place to show that we live."""
        if self.tether is not None:
            self.tether.beat()
        return self.link.stopped or self.link.failed is not None or self._told.is_set()


@contextmanager
def _frugal(config: RunConfig) -> Iterator[None]:
    """Say beside a lack of memory which keys ask for that of an actor."""
    try:
        yield
    except MemoryError as error:
        error.add_note(f"lower env.lanes={config.env.lanes} or actors={config.actors}")
        raise


def run_actor(contact: Contact) -> int:
    """Play until the run is over."""
    member = Member(contact, "actor")
    config, link = member.config, member.link
    threads = config.env.threads or max(1, usable_cores() // config.actors)
    with _frugal(config), closing(make_env(config.env.model_copy(update={"threads": threads}), config.env.lanes,
                                           stall_timeout_s=config.run.stall_timeout_s)) as env:
        member.require(env.spec)
        policy = member.policy("actor", member.index, member.incarnation)
        layout = layout_of(config, env.spec)
        recorder = Recorder(policy.agent, layout, env.lanes, link.replay(layout, env.lanes), config.replay.alpha > 0)
        actor = Actor(policy, env, make_explorer(config, member.index), link.metrics, link.weights, recorder)
        link.start()
        actor.begin(lane_seeds(config.seed, env.lanes, "member", member.index, member.incarnation))
        return member.play(actor)


def run_evaluator(contact: Contact, videos: Path | None = None) -> int:
    """Judge the newest weights whenever that is due, and the last ones when asked to; with a folder, film some."""
    member = Member(contact, "evaluator")
    config, link = member.config, member.link
    films = None if videos is None else Films(config, videos)

    def judged(score: Score, weights: dict[str, torch.Tensor]) -> None:
        if films is not None:  # before the score is told: it may be the last, and then nobody waits for a film
            films.take(evaluator.policy, evaluator.count - 1, link.progress().steps, member.over)
        link.judge(score, weights)

    with closing(make_judge(config)) as env:
        member.require(env.spec)
        evaluator = Evaluator(member.policy("evaluator"), env, link.weights, config.eval, config.seed, link.progress,
                              judged, member.over)
        link.start()
        evaluator.resume()
        return member.play(Last(link, evaluator), evaluator)


class Last:
    """Judges once more when the fleet says that there will be no other weights.

    A learner that was resumed has other weights of the same numbers, and has not heard of any judgement.
    """

    def __init__(self, link: Link, evaluator: Evaluator) -> None:
        self.link, self.evaluator = link, evaluator
        self.epoch = link.welcome.epoch
        self.done = False

    def step(self) -> bool:
        if self.epoch != self.link.welcome.epoch:
            self.epoch, self.done, self.evaluator.judged = self.link.welcome.epoch, False, -1
            self.evaluator.resume()
        if not self.link.final or self.done:
            return False
        self.evaluator.judge()
        self.done = not self.evaluator.owed
        return True

