"""Ray launcher: nodes are Ray actors, placed in a cluster, or in a local Ray that ends with the run.

    driver (this process)  ──▶ learners     in a placement group with evaluator, coordinator and shards, on this node
        also Ray's driver  ──▶ evaluator    unless configured otherwise: the run directory is here
                           ──▶ actors       spread over the nodes of the cluster
    actors, evaluator ──▶ learner           the messages of any fleet, as Ray calls

All Ray actors belong to this process and end with it.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from qfleet.launch.ray_handle import RayActorSlot, RayProcessHandle
from qfleet.launch.ray_nodes import (
    SHARDS,
    RayEndpoint,
    actor_job,
    coordinator_job,
    evaluator_job,
    learner_job,
    rank_job,
    shard_job,
    worker_job,
)
from qfleet.launch.ray_session import MAX_FOLDER_BYTES, RaySession, require_ray
from qfleet.launch.run_request import RunRequest
from qfleet.launch.topology import Node, Role, count
from qfleet.process.handle import ChildSpec, ProcessHandle
from qfleet.runconfig.run_config import RunConfig
from qfleet.runs.directory import RunDirectory
from qfleet.sync.process_group import RankInfo
from qfleet.transport.ray_rendezvous import RayRendezvous, start_rendezvous


class RayLauncher:
    """Implements `Launcher`."""

    def __init__(self, config: RunConfig, directory: RunDirectory) -> None:
        self._config, self._directory = config, directory
        self.folder = _short_folder()
        self._session: RaySession | None = None
        self._group: Any = None
        self._rendezvous: RayRendezvous | None = None
        self._nodes: dict[str, Node] = {}
        self._placed: list[Node] = []  # nodes with a bundle in the placement group, in the order of the bundles
        self._slots: dict[str, RayActorSlot] = {}
        self._main: list[ProcessHandle] = []  # instances of the first node
        self._result: str | None = None

    @staticmethod
    def require() -> None:
        require_ray()

    def open(self, run_request: RunRequest, nodes: Sequence[Node]) -> None:
        self._run_request = run_request
        self._nodes = {node.name: node for node in nodes}
        self._placed = [node for node in nodes if node.role is not Role.ACTOR]
        cpus = sum(node.resources["CPU"] for node in nodes)
        self._session = RaySession(self._config.ray, self.folder / "ray", cpus)
        self._group = self._session.reserve(self._bundles, "PACK", not self._config.ray.learner_any_node)
        if count(nodes, Role.SHARD):
            shutil.rmtree(self._shard_folder, ignore_errors=True)  # left by a driver that was killed
            self._shard_folder.mkdir()
        if any(node.group for node in nodes):
            self._rendezvous = start_rendezvous()
        for node in self._placed:
            self._slot(node.name)

    def start(self, node: Node, attempt: int, now: float, may_start: Callable[[], bool]) -> ProcessHandle:
        def on_message(message: str) -> None:
            if node.name == self._placed[0].name and message.startswith("{"):
                self._result = message

        if attempt == 1 and node.role is Role.ACTOR:  # perhaps a new one in the place of one that was removed
            self._nodes[node.name] = node
            self._slots.pop(node.name, None)
        child = ChildSpec(node.name, [], {}, node.log_path(self._directory.path))
        handle = RayProcessHandle(self._slot(node.name), child, attempt, now, on_message, may_start)
        if node.name == self._placed[0].name:
            self._main.append(handle)
        return handle

    def release(self, node: Node) -> None:
        if (slot := self._slots.pop(node.name, None)) is not None:
            slot.kill("", for_good=True)

    def room(self) -> int | None:
        if not self._config.ray.elastic:
            return None
        assert self._session is not None
        needs = next(node.resources for node in self._nodes.values() if node.role is Role.ACTOR)
        return max(1, self._session.room(needs, self._group, self._bundles))

    def has_started(self) -> bool:
        return any(handle.beats for handle in self._main)

    def result(self) -> str | None:
        return self._result

    def invitation(self) -> list[tuple[str, str]]:
        return []

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            shutil.rmtree(self._shard_folder, ignore_errors=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def _bundles(self) -> list[dict[str, float]]:
        return [dict(node.resources) for node in self._placed]

    @property
    def _shard_folder(self) -> Path:
        return self._directory.path / SHARDS

    def _slot(self, name: str) -> RayActorSlot:
        """The Ray actor of a node, created with those of the nodes that it calls."""
        if name in self._slots:
            return self._slots[name]
        node, session = self._nodes[name], self._session
        assert session is not None
        place: dict[str, Any] = {}
        if node.role is not Role.ACTOR:
            place = {"group": self._group, "bundle": self._placed.index(node)}
        log_path = node.log_path(self._directory.path)
        log_path.parent.mkdir(exist_ok=True)
        log_path.touch()  # the Ray actor does not create it, since its node may not share this disk

        def create() -> Any:
            return session.create(f"{self.folder.name}/{name}", log_path, node.resources, **place)

        self._slots[name] = RayActorSlot(create, *self._job(node))
        return self._slots[name]

    def _job(self, node: Node) -> tuple[Any, ...]:
        """Main function of a node and its arguments."""
        if node.main == "learner":
            return learner_job, self._run_request
        if node.main == "coordinator":
            return coordinator_job, self._run_request, self._shards(node)
        if node.main == "rank":
            return rank_job, self._run_request, self._rank_info(node)
        if node.main == "shard":
            return shard_job, self._run_request, node.index
        if node.main == "worker":
            return worker_job, self._endpoint(node), self._run_request, self._shards(node)
        if node.main == "actor":
            return actor_job, self._endpoint(node)
        videos = str(self._directory.videos.resolve()) if self._config.eval.video_period else None
        return evaluator_job, self._endpoint(node), videos

    def _shards(self, node: Node) -> list[Any]:
        return [self._slot(name).handle for name in node.calls if self._nodes[name].role is Role.SHARD]

    def _rank_info(self, node: Node) -> RankInfo:
        size, gpus = count(self._placed, Role.LEARNER), node.resources.get("GPU", 0.0)
        ranks_per_gpu = math.ceil(1 / gpus) if gpus else size  # ranks that share a GPU
        return RankInfo(node.index, size, 0, ranks_per_gpu, rendezvous=self._rendezvous or "env://")

    def _endpoint(self, node: Node) -> RayEndpoint:
        cores = max(1, int(self._config.ray.actor_cpus))  # for environments
        return RayEndpoint(self._slot(node.calls[0]).handle, node.name, f"the learner of {self._directory.path}",
                           self._config.fleet.reconnect_timeout_s, cores)


def _short_folder() -> Path:
    """Private folder with a path short enough for Ray's sockets below it."""
    short = len(os.fsencode(tempfile.gettempdir())) + len("/qfleet-12345678/ray") <= MAX_FOLDER_BYTES
    return Path(tempfile.mkdtemp(prefix="qfleet-", dir=None if short else "/tmp"))
