"""Ray launcher: places the roles of a run as Ray actors, supervises them, and adapts their number to the cluster.

    driver (this process)  ──▶ learner      in a placement group with the evaluator, on this node unless configured
        also Ray's driver  ──▶ evaluator    otherwise: the run directory is here
                           ──▶ actors       spread over the nodes; or ranks, or parameter-server workers, which act
    actors, evaluator ──▶ learner           the messages of any fleet, as Ray calls

Loops, messages and supervisor are those of `driver`; all Ray actors belong to this process and end with it.
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
from qfleet.runs.membership import record_exit
from qfleet.sync.process_group import RankInfo
from qfleet.training.meter import Sink
from qfleet.transport.ray_rendezvous import start_rendezvous

log = logging.getLogger(__name__)

RESIZE_S = 2.0
"""Period of polling the size of the cluster."""

ACTOR, EVALUATOR, SERVER = "actor", "evaluator", "server"
WAITING_S = 60.0
"""After so long without resources for an actor the user is warned."""


def start(config: RunConfig, sinks: Sequence[Sink], provenance: Mapping[str, str]) -> TrainResult:
    """Train a new run."""
    require_ray()
    return driver.start(config, sinks, provenance, RayDriver)


def resume(directory: RunDirectory, config: RunConfig, sinks: Sequence[Sink]) -> TrainResult:
    """Continue a run from its newest valid checkpoint."""
    require_ray()
    return driver.resume(directory, config, sinks, RayDriver)


class RayDriver(driver.Driver):
    """Driver whose children are Ray actors.

    A parameter server has workers, shards and a coordinator. Ranks are one child, since they start, fail and restart
    together.
    """

    def __init__(self, config: RunConfig, spec: EnvSpec, directory: RunDirectory, sinks: Sequence[Sink],
                 origin: Mapping[str, Any]) -> None:
        self.main_child = "coordinator" if config.has_server else "learners" if config.has_ranks else driver.LEARNER
        self.resources = {
            role: config.ray.resources(role, config.device) for role in (driver.LEARNER, EVALUATOR, ACTOR, SERVER)
        }
        self.group_roles = (
            [SERVER] * (1 + config.parameter_server.shards) * config.has_server + [driver.LEARNER] * config.learners
            + [EVALUATOR] * config.evaluator_process
        )
        self._ranks = [f"rank/{rank}" for rank in range(config.learners)] if config.has_ranks else []
        self.roles: dict[str, str] = {}
        self.slots: dict[str, RayActorSlot] = {}
        self.handles: dict[str, RayProcessHandle | RestartGroup] = {}
        self._leaving: set[str] = set()
        self._resized_at = self._complete_at = time.monotonic()
        self._private_folder = _short_folder()
        try:
            roles = [*self.group_roles, *[ACTOR] * config.actors]
            cpus = sum(self.resources[role]["CPU"] for role in roles)
            self.session = RaySession(config.ray, self._private_folder / "ray", cpus)
        except BaseException:
            shutil.rmtree(self._private_folder, ignore_errors=True)
            raise
        try:
            self.bundles = [self.resources[role] for role in self.group_roles]
            self.group = self.session.reserve(self.bundles, "PACK", not config.ray.learner_any_node)
            if config.ray.elastic:
                config = config.model_copy(update={"actors": self._room()})
                replace_text(directory.config, to_yaml(config))
            super().__init__(config, spec, directory, sinks, origin)
        except BaseException:
            self.session.close()
            shutil.rmtree(self._private_folder, ignore_errors=True)
            raise

    def step(self) -> bool:
        endpoint_file = self.private / RunRequest.ENDPOINT_FILE
        if not endpoint_file.exists() and (learner := self.handles.get(self.main_child)) is not None and learner.beats:
            replace_text(endpoint_file, json.dumps({"port": None}))  # it has started: from now on its exit counts
        if time.monotonic() - self._resized_at >= RESIZE_S:
            self._resized_at = time.monotonic()
            if self.config.ray.elastic and self.reason is None:
                self._resize()
            self._warn_of_missing()
        return super().step()

    def _make_private_folder(self) -> Path:
        return self._private_folder

    def _clean(self) -> None:
        self.session.close()
        shutil.rmtree(self.directory.path / SHARDS, ignore_errors=True)
        super()._clean()

    def _make_supervisor(self, policy: RestartPolicy) -> Supervisor:
        return Supervisor(self._children(), log.warning, policy, lambda name: None, self.private, self._begin,
                          partial(record_exit, self.directory.path))

    def _begin(self, child: ChildSpec, number: int, now: float) -> RayProcessHandle | RestartGroup:
        def on_message(message: str) -> None:
            if child.name == self.main_child and message.startswith("{"):
                replace_text(self.private / RunRequest.RESULT_FILE, message)

        if child.name in self.slots:
            self.handles[child.name] = RayProcessHandle(self.slots[child.name], child, number, now, on_message)
        else:
            self.handles[child.name] = RestartGroup(
                [
                    RayProcessHandle(self.slots[name], replace(child, name=name), number, now, on_message)
                    for name in self._ranks
                ],
                now,
            )
        return self.handles[child.name]

    def _forward_signal(self, number: signal.Signals) -> bool:
        return self.supervisor.request_stop(self.main_child)

    def _result(self, failure: ChildFailure | None) -> TrainResult:
        """Result with the reason of a received signal: the learner is asked to stop without a reason."""
        result = super()._result(failure)
        if self.reason is None or result.reason not in EXIT_CODES:
            return result
        return replace(result, reason=self.reason, exit_code=EXIT_CODES[self.reason])

    def _children(self) -> list[ChildSpec]:
        config, videos, timeout = (
            self.config, self._video_args(), {"silence_s": driver.heartbeat_timeout_of(self.config)})
        if config.has_server:
            shutil.rmtree(self.directory.path / SHARDS, ignore_errors=True)  # left by a driver that was killed
            (self.directory.path / SHARDS).mkdir()
            shards = [self._child(f"shard/{i}", SERVER, shard_job, self.run_request, i, memory_hint="agent.hidden")
                      for i in range(config.parameter_server.shards)]
            handles = [self.slots[shard.name].handle for shard in shards]
            main = [
                self._child(
                    self.main_child, SERVER, learner_job, self.run_request, handles,
                    max_restarts=config.fleet.learner_restarts, memory_hint="agent.hidden"),
                *shards,
            ]
            workers = [
                self._child(
                    f"learner/{i}", driver.LEARNER, worker_job, self._endpoint(f"learner/{i}"), self.run_request,
                    handles, memory_hint="learners, env.lanes or replay.capacity", **timeout)
                for i in range(config.learners)
            ]
        elif config.has_ranks:
            main, workers = [self._rank_group()], []
        else:
            main = [
                self._child(
                    self.main_child, driver.LEARNER, learner_job, self.run_request,
                    max_restarts=config.fleet.learner_restarts, memory_hint="replay.capacity or learner.batch_size")
            ]
            workers = [self._actor(index) for index in range(config.actors)]
        if config.evaluator_process:
            workers.append(self._child(EVALUATOR, EVALUATOR, evaluator_job, self._endpoint(EVALUATOR),
                                       videos[-1] if videos else None, **timeout))
        return [*main, *workers]

    def _rank_group(self) -> ChildSpec:
        config, size = self.config, self.config.learners
        gpus = self.resources[driver.LEARNER].get("GPU", 0.0)
        ranks_per_gpu = math.ceil(1 / gpus) if gpus else size  # ranks that share a GPU
        rank_info = RankInfo(0, size, 0, ranks_per_gpu, rendezvous=start_rendezvous())
        path = self.directory.path / "logs" / "learners.log"
        for rank, name in enumerate(self._ranks):
            self._make_slot(name, driver.LEARNER, path, rank_job, self.run_request, replace(rank_info, rank=rank))
        self.roles[self.main_child] = driver.LEARNER
        return ChildSpec(
            self.main_child, [], {}, path, config.allreduce.max_restarts, "replay.capacity or learner.batch_size"
        )

    def _actor(self, index: int) -> ChildSpec:
        name = f"actor/{index}"
        return self._child(
            name, ACTOR, actor_job, self._endpoint(name), silence_s=driver.heartbeat_timeout_of(self.config)
        )

    def _child(self, name: str, role: str, job: Callable[..., int], *args: Any, **options: Any) -> ChildSpec:
        path = self.directory.path / "logs" / f"{name.replace('/', '-')}.log"
        self._make_slot(name, role, path, job, *args)
        return ChildSpec(name, [], {}, path, **options)

    def _make_slot(self, name: str, role: str, path: Path, job: Callable[..., int], *args: Any) -> None:
        self.roles[name] = role
        placement: dict[str, Any] = {}
        if role != ACTOR:
            placement = {"group": self.group, "bundle": self.group_roles.index(role)}
            self.group_roles[placement["bundle"]] = ""  # in use

        def create() -> Any:
            return self.session.create(f"{self.private.name}/{name}", path, self.resources[role], **placement)

        self.slots[name] = RayActorSlot(create, job, *args)

    def _endpoint(self, name: str) -> RayEndpoint:
        slot = self.slots[self._ranks[0] if self._ranks else self.main_child]
        cores = max(1, int(self.config.ray.actor_cpus))  # for environments
        return RayEndpoint(slot.handle, name, f"the learner of {self.directory.path}",
                           self.config.fleet.reconnect_timeout_s, cores)

    def _room(self) -> int:
        return max(1, self.session.room(self.resources[ACTOR], self.group, self.bundles))

    def _resize(self) -> None:
        """Adapt the number of actors to the cluster; if there are too many, unreachable ones are removed first."""
        present = {name for name in self.supervisor.names if name.startswith("actor/")}
        self._leaving &= present
        names = present - self._leaving
        room = self._room()
        if len(names) != room:
            show_plan(self.sinks, [("actors", f"{len(names)}, the cluster has room for {room}")])
        free = (index for index in count() if f"actor/{index}" not in names)
        for index in islice(free, max(0, room - len(names))):
            if f"actor/{index}" not in self._leaving:  # its index is reused once it has left
                self.supervisor.add(self._actor(index))
        order = sorted(
            names, key=lambda name: (name in self.handles and self.handles[name].is_unreachable, _index(name))
        )
        for name in order[room:]:
            self._leaving.add(name)
            self.supervisor.remove(name)
            if name not in self.supervisor.names:  # it had not started
                self.slots[name].kill("", for_good=True)

    def _warn_of_missing(self) -> None:
        """Warn periodically about children that wait for resources of the cluster."""
        missing = [name for name, handle in self.handles.items()
                   if handle.is_unreachable and name in self.supervisor.names]
        now = time.monotonic()
        if not missing:
            self._complete_at = now
        elif now - self._complete_at >= WAITING_S:
            self._complete_at = now
            needed = ", ".join(f"{amount:g} {name}" for name, amount in self.resources[self.roles[missing[0]]].items())
            log.warning("%s: no node has free resources for it, or its node is unreachable; it needs %s",
                        ", ".join(sorted(missing)), needed)


def _short_folder() -> Path:
    """Private folder with a path short enough for Ray's sockets below it."""
    short = len(os.fsencode(tempfile.gettempdir())) + len("/qfleet-12345678/ray") <= MAX_FOLDER_BYTES
    return Path(tempfile.mkdtemp(prefix="qfleet-", dir=None if short else "/tmp"))


def _index(name: str) -> int:
    return int(name.removeprefix("actor/"))
