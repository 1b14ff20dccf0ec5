"""Runs whose roles are Ray actors: who places them in a cluster, keeps them alive, and lets them follow its size.

    head (this process) ──▶ cell                   in a placement group with the evaluator, on this node unless told
         driver of Ray  ──▶ evaluator              otherwise: the run's directory is here
                        ──▶ actors                 spread over the nodes
    actors, evaluator ──▶ cell                     the messages of any fleet, as Ray calls

The loops, the messages and the supervisor are those of `head`; all actors belong to this process and end with it.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import Any

from qfleet import head
from qfleet.cellhost import Orders, as_text, learn, sole_writer
from qfleet.config import to_yaml
from qfleet.members import run_actor, run_evaluator
from qfleet.roles.learner import Diverged
from qfleet.roles.metrics import Sink
from qfleet.runs.directory import RunDirectory, replace_text
from qfleet.runtime.cluster.carrier import RayCaller, answering
from qfleet.runtime.cluster.host import Host
from qfleet.runtime.cluster.life import RayLife, Stand
from qfleet.runtime.cluster.session import LONGEST_FOLDER, RaySession, require_ray
from qfleet.runtime.supervise import VAIN, Child, Failure, Patience, Supervisor
from qfleet.runtime.tether import Tie
from qfleet.runtime.wire.client import Link
from qfleet.runtime.wire.desk import Desk
from qfleet.runtime.wire.inbox import Inbox
from qfleet.runtime.wire.registry import Registry
from qfleet.session import EXIT_CODES, TrainResult, show_plan
from qfleet.settings import RunConfig
from qfleet.types import EnvSpec, UserError

log = logging.getLogger(__name__)

RESIZE_S = 2.0
"""How often the cluster is asked for its size."""

ACTOR, EVALUATOR = "actor", "evaluator"
WAITING_S = 30.0
"""After so long without room for an actor people are told."""


def start(config: RunConfig, sinks: Sequence[Sink], provenance: Mapping[str, str]) -> TrainResult:
    """Train a new run."""
    require_ray()
    return head.start(config, sinks, provenance, Troop)


def go_on(directory: RunDirectory, config: RunConfig, sinks: Sequence[Sink]) -> TrainResult:
    """Continue a run from its newest valid checkpoint."""
    require_ray()
    return head.go_on(directory, config, sinks, Troop)


@dataclass(frozen=True)
class Errand:
    """The `Way` of a Ray actor to its cell, which is another."""

    cell: Any
    name: str
    address: str
    patience_s: float
    cores: int
    line: Tie | None = None
    trusted: bool = True  # whoever may call Ray actors may do anything here

    def tie(self) -> Tie | None:
        return self.line

    def link(self, role: str) -> Link:
        return Link(RayCaller(self.cell, self.address), self.name, role, self.patience_s)


class Reception:
    """A cell's: calls come to its Ray actor, which keeps its result for whoever looks."""

    def __init__(self, host: Host) -> None:
        self._host = host

    @contextmanager
    def __call__(self, desk: Desk, registry: Registry, inbox: Inbox, config: RunConfig) -> Iterator[None]:
        with answering(self._host, desk, registry, inbox, config.fleet.max_message_bytes):
            yield

    def tell(self, result: TrainResult) -> None:
        self._host.word = as_text(result)


def lead(host: Host, orders: Orders) -> int:
    """What the cell's Ray actor does."""
    run = Path(orders.directory)
    if not run.is_dir():
        raise UserError(f"the node of the learner does not see {run}: with ray.cell_anywhere=true all nodes must share "
                        "the disk of run.root")
    try:
        with sole_writer(run):
            learn(orders, host.line, Reception(host))
    except Diverged as error:
        host.word = f"training failed: {error}"
        return VAIN
    return 0


def act(host: Host, errand: Errand) -> int:
    return run_actor(replace(errand, line=host.line))


def judge(host: Host, errand: Errand, videos: str | None) -> int:
    return run_evaluator(replace(errand, line=host.line), None if videos is None else Path(videos))


class Troop(head.Head):
    """A head whose children are Ray actors."""

    def __init__(self, config: RunConfig, spec: EnvSpec, directory: RunDirectory, sinks: Sequence[Sink],
                 origin: Mapping[str, Any]) -> None:
        self.needs = {role: config.ray.needs(role, config.device) for role in (head.CELL, EVALUATOR, ACTOR)}
        self.stands: dict[str, Stand] = {}
        self.lives: dict[str, RayLife] = {}
        self._leaving: set[str] = set()
        self._looked_at = self._present_at = time.monotonic()
        self._made = _short_folder()
        try:
            cpus = sum(self.needs[role]["CPU"] * (config.actors if role == ACTOR else 1) for role in self.needs)
            self.session = RaySession(config.ray, self._made / "ray", cpus)
        except BaseException:
            shutil.rmtree(self._made, ignore_errors=True)
            raise
        try:
            if config.ray.elastic:
                config = config.model_copy(update={"actors": self._room()})
                replace_text(directory.config, to_yaml(config))
            self.group = self.session.place([self.needs[head.CELL], self.needs[EVALUATOR]], "PACK",
                                            not config.ray.cell_anywhere)
            super().__init__(config, spec, directory, sinks, origin)
        except BaseException:
            self.session.close()
            shutil.rmtree(self._made, ignore_errors=True)
            raise

    def step(self) -> bool:
        door = self.private / Orders.DOOR
        if not door.exists() and (cell := self.lives.get(self.main)) is not None and cell.beats:
            replace_text(door, json.dumps({"port": None}))  # it has begun: from now on a death is one
        if time.monotonic() - self._looked_at >= RESIZE_S:
            self._looked_at = time.monotonic()
            if self.config.ray.elastic and self.reason is None:
                self._follow()
            self._mention_absent()
        return super().step()

    def _folder(self) -> Path:
        return self._made

    def _clean(self) -> None:
        self.session.close()
        super()._clean()

    def _supervised(self, patience: Patience) -> Supervisor:
        return Supervisor(self._children(), log.warning, patience, lambda name: None, self.private, self._begin)

    def _begin(self, child: Child, number: int, now: float) -> RayLife:
        def heard(word: str) -> None:
            if child.name == self.main and word.startswith("{"):
                replace_text(self.private / Orders.RESULT, word)

        self.lives[child.name] = RayLife(self.stands[child.name], child, number, now, heard)
        return self.lives[child.name]

    def _pass_on(self, number: signal.Signals) -> bool:
        return self.supervisor.ask(self.main)

    def _result(self, failure: Failure | None) -> TrainResult:
        """A cell is asked to end and not told why."""
        result = super()._result(failure)
        if self.reason is None or result.reason not in EXIT_CODES:
            return result
        return replace(result, reason=self.reason, exit_code=EXIT_CODES[self.reason])

    def _children(self) -> list[Child]:
        fleet, videos = self.config.fleet, self._films()
        cell = self._child(head.CELL, head.CELL, lead, self.orders, max_restarts=fleet.restarts,
                           appetite="replay.capacity or learner.batch_size")
        evaluator = self._child(EVALUATOR, EVALUATOR, judge, self._errand(EVALUATOR), videos[-1] if videos else None,
                                silence_s=self._silence_s())
        return [cell, evaluator, *(self._actor(index) for index in range(self.config.actors))]

    def _actor(self, index: int) -> Child:
        name = f"local/{index}"
        return self._child(name, ACTOR, act, self._errand(name), silence_s=self._silence_s())

    def _child(self, name: str, role: str, job: Callable[..., int], *args: Any, **patience: Any) -> Child:
        path = self.directory.path / "logs" / f"{name.replace('local/', 'actor-')}.log"
        place = {} if role == ACTOR else {"group": self.group, "bundle": int(role == EVALUATOR)}
        self.stands[name] = Stand(
            lambda: self.session.create(f"{self.private.name}/{name}", path, self.needs[role], **place), job, *args)
        return Child(name, [], {}, path, **patience)

    def _errand(self, name: str) -> Errand:
        return Errand(self.stands[head.CELL].handle, name, f"the learner of {self.directory.path}",
                      self.config.fleet.patience_s, max(1, int(self.config.ray.actor_cpus)))

    def _room(self) -> int:
        return max(1, self.session.room(self.needs[ACTOR], [self.needs[head.CELL], self.needs[EVALUATOR]]))

    def _follow(self) -> None:
        """Have as many actors as there is room for; where there are too many, who is absent goes first."""
        present = {name for name in self.supervisor.names if name.startswith("local/")}
        self._leaving &= present
        names = present - self._leaving
        room = self._room()
        if len(names) != room:
            show_plan(self.sinks, [("actors", f"{len(names)}, and the cluster has room for {room}")])
        free = (index for index in count() if f"local/{index}" not in names)
        for index in islice(free, max(0, room - len(names))):
            if f"local/{index}" not in self._leaving:  # whose place is taken when it has left
                self.supervisor.add(self._actor(index))
        order = sorted(names, key=lambda name: (name in self.lives and self.lives[name].absent, _index(name)))
        for name in order[room:]:
            self._leaving.add(name)
            self.supervisor.remove(name)
            if name not in self.supervisor.names:  # it was not even there
                self.stands[name].end("", for_good=True)

    def _mention_absent(self) -> None:
        """Say, now and then, who waits for room in the cluster; while all are there, nobody does."""
        absent = [name for name, life in self.lives.items() if life.absent and name in self.supervisor.names]
        now = time.monotonic()
        if not absent:
            self._present_at = now
        elif now - self._present_at >= WAITING_S:
            self._present_at = now
            role = absent[0] if absent[0] in self.needs else ACTOR
            asked = ", ".join(f"{amount:g} {name}" for name, amount in self.needs[role].items())
            log.warning("%s: no node has room for it, or its node is out of reach; it asks for %s",
                        ", ".join(sorted(absent)), asked)


def _short_folder() -> Path:
    """A private folder whose name leaves room for those of Ray's sockets below it."""
    short = len(os.fsencode(tempfile.gettempdir())) + len("/qfleet-12345678/ray") <= LONGEST_FOLDER
    return Path(tempfile.mkdtemp(prefix="qfleet-", dir=None if short else "/tmp"))


def _index(name: str) -> int:
    return int(name.removeprefix("local/"))
