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

from qfleet.config import to_yaml
from qfleet.core.env import EnvSpec
from qfleet.launch import driver
from qfleet.launch.attempt import EXIT_CODES, TrainResult, show_plan
from qfleet.launch.learner_node import RunRequest
from qfleet.launch.ray_handle import RayActorSlot, RayProcessHandle, RestartGroup
from qfleet.launch.ray_nodes import (
    SHARDS,
    RayEndpoint,
    actor_job,
    evaluator_job,
    learner_job,
    rank_job,
    shard_job,
    worker_job,
)
from qfleet.launch.ray_session import MAX_FOLDER_BYTES, RaySession, require_ray
from qfleet.process.supervisor import ChildFailure, ChildSpec, RestartPolicy, Supervisor
from qfleet.runconfig.run_config import RunConfig
from qfleet.runs.directory import RunDirectory, replace_text
from qfleet.runs.members import record_exit
from qfleet.sync.process_group import RankInfo
from qfleet.training.meter import Sink
from qfleet.transport.ray_rendezvous import start_rendezvous

log = logging.getLogger(__name__)

RESIZE_S = 2.0
"""How often the cluster is asked for its size."""

ACTOR, EVALUATOR, SERVER = "actor", "evaluator", "server"
WAITING_S = 60.0
"""After so long without room for an actor people are told."""


def start(config: RunConfig, sinks: Sequence[Sink], provenance: Mapping[str, str]) -> TrainResult:
    """Train a new run."""
    require_ray()
    return driver.start(config, sinks, provenance, RayDriver)


def resume(directory: RunDirectory, config: RunConfig, sinks: Sequence[Sink]) -> TrainResult:
    """Continue a run from its newest valid checkpoint."""
    require_ray()
    return driver.resume(directory, config, sinks, RayDriver)


class RayDriver(driver.Driver):
    """A head whose children are Ray actors.

    Those of a parameter server are cells that play, shards and a registrar. Ranks are one child, for they live, die
    and are started again together.
    """

    def __init__(self, config: RunConfig, spec: EnvSpec, directory: RunDirectory, sinks: Sequence[Sink],
                 origin: Mapping[str, Any]) -> None:
        alone, served = config.gradients == "solo", config.gradients == "server"
        self.main_child = {"solo": driver.LEARNER, "allreduce": "crew", "server": "registrar"}[config.gradients]
        self.resources = {
            role: config.ray.resources(role, config.device) for role in (driver.LEARNER, EVALUATOR, ACTOR, SERVER)
        }
        self.group_roles = (
            [SERVER] * (1 + config.server.shards) * served + [driver.LEARNER] * config.cells + [EVALUATOR]
        )
        self._ranks = [f"rank/{rank}" for rank in range(config.cells)] if config.gradients == "allreduce" else []
        self.roles: dict[str, str] = {}
        self.slots: dict[str, RayActorSlot] = {}
        self.handles: dict[str, RayProcessHandle | RestartGroup] = {}
        self._leaving: set[str] = set()
        self._looked_at = self._present_at = time.monotonic()
        self._made = _short_folder()
        try:
            roles = [*self.group_roles, *[ACTOR] * config.actors * alone]
            cpus = sum(self.resources[role]["CPU"] for role in roles)
            self.session = RaySession(config.ray, self._made / "ray", cpus)
        except BaseException:
            shutil.rmtree(self._made, ignore_errors=True)
            raise
        try:
            self.bundles = [self.resources[role] for role in self.group_roles]
            self.group = self.session.reserve(self.bundles, "PACK", not config.ray.cell_anywhere)
            if config.ray.elastic:
                config = config.model_copy(update={"actors": self._room()})
                replace_text(directory.config, to_yaml(config))
            super().__init__(config, spec, directory, sinks, origin)
        except BaseException:
            self.session.close()
            shutil.rmtree(self._made, ignore_errors=True)
            raise

    def step(self) -> bool:
        door = self.private / RunRequest.ENDPOINT_FILE
        if not door.exists() and (cell := self.handles.get(self.main_child)) is not None and cell.beats:
            replace_text(door, json.dumps({"port": None}))  # it has begun: from now on a death is one
        if time.monotonic() - self._looked_at >= RESIZE_S:
            self._looked_at = time.monotonic()
            if self.config.ray.elastic and self.reason is None:
                self._resize()
            self._mention_absent()
        return super().step()

    def _folder(self) -> Path:
        return self._made

    def _clean(self) -> None:
        self.session.close()
        shutil.rmtree(self.directory.path / SHARDS, ignore_errors=True)
        super()._clean()

    def _make_supervisor(self, patience: RestartPolicy) -> Supervisor:
        return Supervisor(self._children(), log.warning, patience, lambda name: None, self.private, self._begin,
                          partial(record_exit, self.directory.path))

    def _begin(self, child: ChildSpec, number: int, now: float) -> RayProcessHandle | RestartGroup:
        def heard(word: str) -> None:
            if child.name == self.main_child and word.startswith("{"):
                replace_text(self.private / RunRequest.RESULT_FILE, word)

        if child.name in self.slots:
            self.handles[child.name] = RayProcessHandle(self.slots[child.name], child, number, now, heard)
        else:
            self.handles[child.name] = RestartGroup(
                [
                    RayProcessHandle(self.slots[name], replace(child, name=name), number, now, heard)
                    for name in self._ranks
                ],
                now,
            )
        return self.handles[child.name]

    def _forward_signal(self, number: signal.Signals) -> bool:
        return self.supervisor.request_stop(self.main_child)

    def _result(self, failure: ChildFailure | None) -> TrainResult:
        """A cell is asked to end and not told why."""
        result = super()._result(failure)
        if self.reason is None or result.reason not in EXIT_CODES:
            return result
        return replace(result, reason=self.reason, exit_code=EXIT_CODES[self.reason])

    def _children(self) -> list[ChildSpec]:
        config, videos, silence = (
            self.config, self._video_args(), {"silence_s": driver.heartbeat_timeout_of(self.config)})
        if config.gradients == "server":
            shutil.rmtree(self.directory.path / SHARDS, ignore_errors=True)  # of a driver that was killed
            (self.directory.path / SHARDS).mkdir()
            shards = [self._child(f"shard/{i}", SERVER, shard_job, self.run_request, i, memory_hint="agent.hidden")
                      for i in range(config.server.shards)]
            handles = [self.slots[shard.name].handle for shard in shards]
            first = [
                self._child(
                    self.main_child, SERVER, learner_job, self.run_request, handles,
                    max_restarts=config.fleet.restarts, memory_hint="agent.hidden"),
                *shards,
            ]
            players = [
                self._child(
                    f"cell/{i}", driver.LEARNER, worker_job, self._endpoint(f"cell/{i}"), self.run_request,
                    handles, memory_hint="cells, env.lanes or replay.capacity", **silence)
                for i in range(config.cells)
            ]
        elif config.gradients == "allreduce":
            first, players = [self._rank_group()], []
        else:
            first = [
                self._child(
                    self.main_child, driver.LEARNER, learner_job, self.run_request,
                    max_restarts=config.fleet.restarts, memory_hint="replay.capacity or learner.batch_size")
            ]
            players = [self._actor(index) for index in range(config.actors)]
        judged = self._child(
            EVALUATOR, EVALUATOR, evaluator_job, self._endpoint(EVALUATOR), videos[-1] if videos else None, **silence
        )
        return [*first, *players, judged]

    def _rank_group(self) -> ChildSpec:
        config, size = self.config, self.config.cells
        gpus = self.resources[driver.LEARNER].get("GPU", 0.0)
        near = math.ceil(1 / gpus) if gpus else size  # who shares its GPU
        place = RankInfo(0, size, 0, near, rendezvous=start_rendezvous())
        path = self.directory.path / "logs" / "ranks.log"
        for rank, name in enumerate(self._ranks):
            self._make_slot(name, driver.LEARNER, path, rank_job, self.run_request, replace(place, rank=rank))
        self.roles[self.main_child] = driver.LEARNER
        return ChildSpec(
            self.main_child, [], {}, path, config.allreduce.max_restarts, "replay.capacity or learner.batch_size"
        )

    def _actor(self, index: int) -> ChildSpec:
        name = f"local/{index}"
        return self._child(
            name, ACTOR, actor_job, self._endpoint(name), silence_s=driver.heartbeat_timeout_of(self.config)
        )

    def _child(self, name: str, role: str, job: Callable[..., int], *args: Any, **patience: Any) -> ChildSpec:
        path = self.directory.path / "logs" / f"{name.replace('local/', 'actor-').replace('/', '-')}.log"
        self._make_slot(name, role, path, job, *args)
        return ChildSpec(name, [], {}, path, **patience)

    def _make_slot(self, name: str, role: str, path: Path, job: Callable[..., int], *args: Any) -> None:
        self.roles[name] = role
        place: dict[str, Any] = {}
        if role != ACTOR:
            place = {"group": self.group, "bundle": self.group_roles.index(role)}
            self.group_roles[place["bundle"]] = ""  # taken
        self.slots[name] = RayActorSlot(
            lambda: self.session.create(f"{self.private.name}/{name}", path, self.resources[role], **place), job, *args)

    def _endpoint(self, name: str) -> RayEndpoint:
        asked = self.slots[self._ranks[0] if self._ranks else self.main_child]
        return RayEndpoint(asked.handle, name, f"the learner of {self.directory.path}",
                           self.config.fleet.patience_s, max(1, int(self.config.ray.actor_cpus)))  # of environments

    def _room(self) -> int:
        return max(1, self.session.room(self.resources[ACTOR], self.group, self.bundles))

    def _resize(self) -> None:
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
        order = sorted(
            names, key=lambda name: (name in self.handles and self.handles[name].is_unreachable, _index(name))
        )
        for name in order[room:]:
            self._leaving.add(name)
            self.supervisor.remove(name)
            if name not in self.supervisor.names:  # it was not even there
                self.slots[name].kill("", for_good=True)

    def _mention_absent(self) -> None:
        """Say, now and then, who waits for room in the cluster; while all are there, nobody does."""
        absent = [name for name, life in self.handles.items() if life.is_unreachable and name in self.supervisor.names]
        now = time.monotonic()
        if not absent:
            self._present_at = now
        elif now - self._present_at >= WAITING_S:
            self._present_at = now
            asked = ", ".join(f"{amount:g} {name}" for name, amount in self.resources[self.roles[absent[0]]].items())
            log.warning("%s: no node has room for it, or its node is out of reach; it asks for %s",
                        ", ".join(sorted(absent)), asked)


def _short_folder() -> Path:
    """A private folder whose name leaves room for those of Ray's sockets below it."""
    short = len(os.fsencode(tempfile.gettempdir())) + len("/qfleet-12345678/ray") <= MAX_FOLDER_BYTES
    return Path(tempfile.mkdtemp(prefix="qfleet-", dir=None if short else "/tmp"))


def _index(name: str) -> int:
    return int(name.removeprefix("local/"))
