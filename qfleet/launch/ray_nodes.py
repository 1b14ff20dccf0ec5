"""Jobs of the Ray actors of a run: each function runs in a thread of its `RayHost`, and receives RPCs by Ray.

A learner trains on what actors send (`learner_job`); ranks train and average gradients (`rank_job`); workers of a
parameter server train and push gradients (`worker_job`) to shards (`shard_job`), under a coordinator
(`coordinator_job`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qfleet.core.errors import UserError
from qfleet.launch.actor_node import run_actor
from qfleet.launch.coordinator import ConnectShards
from qfleet.launch.coordinator_node import serve_coordinator
from qfleet.launch.evaluator_node import run_evaluator
from qfleet.launch.learner_node import serve_learner
from qfleet.launch.rank_node import serve_rank
from qfleet.launch.ray_session import node_address
from qfleet.launch.run_request import RunRequest
from qfleet.launch.serving import result_json
from qfleet.launch.shard_node import serve_shard
from qfleet.launch.train_result import TrainResult
from qfleet.launch.worker_node import serve_worker
from qfleet.process.heartbeat import Heartbeat
from qfleet.runconfig.run_config import RunConfig
from qfleet.sync.process_group import RankInfo, network_interface
from qfleet.transport.client import FleetConnection
from qfleet.transport.fleet_server import FleetService
from qfleet.transport.inbox import Inbox
from qfleet.transport.published_state import PublishedState
from qfleet.transport.ray_channel import RayChannel, RayShardChannel, fleet_methods, serve_calls
from qfleet.transport.ray_host import RayHost
from qfleet.transport.registry import Registry
from qfleet.transport.shard_client import RemoteShard

log = logging.getLogger(__name__)

SHARDS = ".shards"


@dataclass(frozen=True)
class RayEndpoint:
    """`Endpoint` of a Ray actor: its learner is another Ray actor."""

    learner: Any
    name: str
    address: str
    patience_s: float
    cores: int
    host_heartbeat: Heartbeat | None = None
    trusted: bool = True  # access to Ray implies code execution

    def heartbeat(self) -> Heartbeat | None:
        return self.host_heartbeat

    def at_port(self, port: int) -> RayEndpoint:
        """Not used: no members join a run on Ray."""
        return self

    def connect(self, role: str) -> FleetConnection:
        return FleetConnection(RayChannel(self.learner, self.address), self.name, role, self.patience_s)


class RayServing:
    """Implements `RunServing` by Ray calls to the learner's actor, which keeps the result for the driver."""

    def __init__(self, host: RayHost) -> None:
        self._host = host

    @contextmanager
    def __call__(self, published: PublishedState, registry: Registry, inbox: Inbox,
                 config: RunConfig) -> Iterator[None]:
        with serve_calls(
            self._host, fleet_methods(FleetService(published, registry, inbox, config.fleet.max_message_bytes))
        ):
            yield

    def report_result(self, result: TrainResult) -> None:
        self._host.report(result_json(result))


def ray_shard_clients(handles: Sequence[Any]) -> ConnectShards:
    return lambda config, wait: [
        RemoteShard(RayShardChannel(handle, f"shard {index}"), config.fleet.reconnect_timeout_s, wait)
        for index, handle in enumerate(handles)]


def learner_job(host: RayHost, run_request: RunRequest) -> int:
    _require_directory(run_request)
    return serve_learner(run_request, host.heartbeat, RayServing(host), host.report)


def coordinator_job(host: RayHost, run_request: RunRequest, shards: Sequence[Any]) -> int:
    _require_directory(run_request)
    return serve_coordinator(run_request, host.heartbeat, RayServing(host), ray_shard_clients(shards), host.report)


def rank_job(host: RayHost, run_request: RunRequest, rank_info: RankInfo) -> int:
    _require_directory(run_request)
    if (name := network_interface(node_address())) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)  # the host name may resolve to another interface
    return serve_rank(run_request, replace(rank_info, attempt=host.number), host.heartbeat, RayServing(host),
                      host.report)


def _require_directory(run_request: RunRequest) -> None:
    run = run_request.run.path
    if not run.is_dir():
        raise UserError(f"the node of the learner cannot read {run}: with ray.learner_any_node=true all nodes must "
                        "share the disk of run.root")


def actor_job(host: RayHost, endpoint: RayEndpoint) -> int:
    return run_actor(replace(endpoint, host_heartbeat=host.heartbeat))


def shard_job(host: RayHost, run_request: RunRequest, index: int) -> int:
    return serve_shard(
        run_request.config(), run_request.spec, index, run_request.run.path / SHARDS, host.heartbeat,
        lambda service: serve_calls(host, service.methods))


def worker_job(host: RayHost, endpoint: RayEndpoint, run_request: RunRequest, shards: Sequence[Any]) -> int:
    return serve_worker(replace(endpoint, host_heartbeat=host.heartbeat), run_request.run, ray_shard_clients(shards),
                        RayServing(host), host.report)


def evaluator_job(host: RayHost, endpoint: RayEndpoint, videos: str | None) -> int:
    return run_evaluator(replace(endpoint, host_heartbeat=host.heartbeat), None if videos is None else Path(videos))


