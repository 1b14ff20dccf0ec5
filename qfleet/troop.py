"""Runs whose roles are Ray actors: who places them in a cluster, keeps them alive, and lets them follow its size.

    head (this process) ──▶ cell                   in a placement group with the evaluator, on this node unless told
         driver of Ray  ──▶ evaluator              otherwise: the run's directory is here
                        ──▶ actors                 spread over the nodes; or ranks, or cells, which play for themselves
    actors, evaluator ──▶ cell                     the messages of any fleet, as Ray calls

The loops, the messages and the supervisor are those of `head`; all actors belong to this process and end with it.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

from qfleet import head
from qfleet.cellhost import Orders
from qfleet.config import to_yaml
from qfleet.duties import SHARDS, Errand, act, average, bundle, hold_shard, judge, lead
from qfleet.roles.metrics import Sink
from qfleet.runs.directory import RunDirectory, replace_text
from qfleet.runs.roll import note_exit
from qfleet.runtime.cluster.life import Joint, RayLife, Stand
from qfleet.runtime.cluster.meeting import start_rendezvous
from qfleet.runtime.cluster.session import LONGEST_FOLDER, RaySession, require_ray
from qfleet.runtime.ranks import Place
from qfleet.runtime.supervise import Child, Failure, Patience, Supervisor
from qfleet.session import EXIT_CODES, TrainResult, show_plan
from qfleet.settings import RunConfig
from qfleet.types import EnvSpec

log = logging.getLogger(__name__)

RESIZE_S = 2.0
"""How often the cluster is asked for its size."""

ACTOR, EVALUATOR, SERVER = "actor", "evaluator", "server"
WAITING_S = 60.0
"""After so long without room for an actor people are told."""


def start(config: RunConfig, sinks: Sequence[Sink], provenance: Mapping[str, str]) -> TrainResult:
    """Train a new run."""
    require_ray()
    return head.start(config, sinks, provenance, Troop)


def go_on(directory: RunDirectory, config: RunConfig, sinks: Sequence[Sink]) -> TrainResult:
    """Continue a run from its newest valid checkpoint."""
    require_ray()
    return head.go_on(directory, config, sinks, Troop)


class Troop(head.Head):
    """A head whose children are Ray actors.

    Those of a parameter server are cells that play, shards and a registrar. Ranks are one child, for they live, die
    and are started again together.
    """

    def __init__(self, config: RunConfig, spec: EnvSpec, directory: RunDirectory, sinks: Sequence[Sink],
                 origin: Mapping[str, Any]) -> None:
        alone, served = config.gradients == "solo", config.gradients == "server"
        self.main = {"solo": head.CELL, "allreduce": "crew", "server": "registrar"}[config.gradients]
        self.needs = {role: config.ray.needs(role, config.device) for role in (head.CELL, EVALUATOR, ACTOR, SERVER)}
        self.packed = [SERVER] * (1 + config.server.shards) * served + [head.CELL] * config.cells + [EVALUATOR]
        self._ranks = [f"rank/{rank}" for rank in range(config.cells)] if config.gradients == "allreduce" else []
        self.roles: dict[str, str] = {}
        self.stands: dict[str, Stand] = {}
        self.lives: dict[str, RayLife | Joint] = {}
        self._leaving: set[str] = set()
        self._looked_at = self._present_at = time.monotonic()
        self._made = _short_folder()
        try:
            roles = [*self.packed, *[ACTOR] * config.actors * alone]
            cpus = sum(self.needs[role]["CPU"] for role in roles)
            self.session = RaySession(config.ray, self._made / "ray", cpus)
        except BaseException:
            shutil.rmtree(self._made, ignore_errors=True)
            raise
        try:
            self.bundles = [self.needs[role] for role in self.packed]
            self.group = self.session.place(self.bundles, "PACK", not config.ray.cell_anywhere)
            if config.ray.elastic:
                config = config.model_copy(update={"actors": self._room()})
                replace_text(directory.config, to_yaml(config))
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
        shutil.rmtree(self.directory.path / SHARDS, ignore_errors=True)
        super()._clean()

    def _supervised(self, patience: Patience) -> Supervisor:
        return Supervisor(self._children(), log.warning, patience, lambda name: None, self.private, self._begin,
                          partial(note_exit, self.directory.path))

    def _begin(self, child: Child, number: int, now: float) -> RayLife | Joint:
        def heard(word: str) -> None:
            if child.name == self.main and word.startswith("{"):
                replace_text(self.private / Orders.RESULT, word)

        if child.name in self.stands:
            self.lives[child.name] = RayLife(self.stands[child.name], child, number, now, heard)
        else:
            self.lives[child.name] = Joint([RayLife(self.stands[name], replace(child, name=name), number, now, heard)
                                            for name in self._ranks], now)
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
        config, videos, silence = self.config, self._films(), {"silence_s": head.silence_s(self.config)}
        if config.gradients == "server":
            shutil.rmtree(self.directory.path / SHARDS, ignore_errors=True)  # of a driver that was killed
            (self.directory.path / SHARDS).mkdir()
            shards = [self._child(f"shard/{i}", SERVER, hold_shard, self.orders, i, appetite="agent.hidden")
                      for i in range(config.server.shards)]
            handles = [self.stands[shard.name].handle for shard in shards]
            first = [self._child(self.main, SERVER, lead, self.orders, handles, max_restarts=config.fleet.restarts,
                                 appetite="agent.hidden"), *shards]
            players = [self._child(f"cell/{i}", head.CELL, bundle, self._errand(f"cell/{i}"), self.orders, handles,
                                   appetite="cells, env.lanes or replay.capacity", **silence)
                       for i in range(config.cells)]
        elif config.gradients == "allreduce":
            first, players = [self._crew()], []
        else:
            first = [self._child(self.main, head.CELL, lead, self.orders, max_restarts=config.fleet.restarts,
                                 appetite="replay.capacity or learner.batch_size")]
            players = [self._actor(index) for index in range(config.actors)]
        judged = self._child(EVALUATOR, EVALUATOR, judge, self._errand(EVALUATOR), videos[-1] if videos else None,
                             **silence)
        return [*first, *players, judged]

    def _crew(self) -> Child:
        config, size = self.config, self.config.cells
        gpus = self.needs[head.CELL].get("GPU", 0.0)
        near = math.ceil(1 / gpus) if gpus else size  # who shares its GPU
        place = Place(0, size, 0, near, meeting=start_rendezvous())
        path = self.directory.path / "logs" / "ranks.log"
        for rank, name in enumerate(self._ranks):
            self._stand(name, head.CELL, path, average, self.orders, replace(place, rank=rank))
        self.roles[self.main] = head.CELL
        return Child(self.main, [], {}, path, config.allreduce.max_restarts, "replay.capacity or learner.batch_size")

    def _actor(self, index: int) -> Child:
        name = f"local/{index}"
        return self._child(name, ACTOR, act, self._errand(name), silence_s=head.silence_s(self.config))

    def _child(self, name: str, role: str, job: Callable[..., int], *args: Any, **patience: Any) -> Child:
        path = self.directory.path / "logs" / f"{name.replace('local/', 'actor-').replace('/', '-')}.log"
        self._stand(name, role, path, job, *args)
        return Child(name, [], {}, path, **patience)

    def _stand(self, name: str, role: str, path: Path, job: Callable[..., int], *args: Any) -> None:
        self.roles[name] = role
        place: dict[str, Any] = {}
        if role != ACTOR:
            place = {"group": self.group, "bundle": self.packed.index(role)}
            self.packed[place["bundle"]] = ""  # taken
        self.stands[name] = Stand(
            lambda: self.session.create(f"{self.private.name}/{name}", path, self.needs[role], **place), job, *args)

    def _errand(self, name: str) -> Errand:
        asked = self.stands[self._ranks[0] if self._ranks else self.main]
        return Errand(asked.handle, name, f"the learner of {self.directory.path}",
                      self.config.fleet.patience_s, max(1, int(self.config.ray.actor_cpus)))  # of environments

    def _room(self) -> int:
        return max(1, self.session.room(self.needs[ACTOR], self.group, self.bundles))

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
            asked = ", ".join(f"{amount:g} {name}" for name, amount in self.needs[self.roles[absent[0]]].items())
            log.warning("%s: no node has room for it, or its node is out of reach; it asks for %s",
                        ", ".join(sorted(absent)), asked)


def _short_folder() -> Path:
    """A private folder whose name leaves room for those of Ray's sockets below it."""
    short = len(os.fsencode(tempfile.gettempdir())) + len("/qfleet-12345678/ray") <= LONGEST_FOLDER
    return Path(tempfile.mkdtemp(prefix="qfleet-", dir=None if short else "/tmp"))


def _index(name: str) -> int:
    return int(name.removeprefix("local/"))
