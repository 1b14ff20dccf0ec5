"""Jobs of the Ray actors of a run: each function runs in a thread of its `RayHost`, and receives RPCs by Ray.

A learner trains on what actors send (`learner_job`); ranks act, train and average gradients (`rank_job`);
parameter-server workers act, train and push gradients (`worker_job`) to shards (`shard_job`).
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
from qfleet.launch.actor_node import run_actor, run_evaluator
from qfleet.launch.attempt import FINAL_ERRORS, TrainResult, describe_final_error
from qfleet.launch.coordinator import ConnectShards
from qfleet.launch.learner_node import RunRequest, exclusive_writer, learn, result_json
from qfleet.launch.rank_node import serve_rank
from qfleet.launch.ray_session import node_address
from qfleet.launch.shard_node import serve_shard
from qfleet.launch.worker_node import train_worker
from qfleet.process.heartbeat import Heartbeat
from qfleet.process.supervisor import EXIT_OK, EXIT_UNRECOVERABLE
from qfleet.runconfig import resolution
from qfleet.runconfig.run_config import RunConfig
from qfleet.runs.directory import RunDirectory
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
    """`Serving` by Ray calls to the learner's actor, which keeps the result for the driver."""

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
        self._host.message = result_json(result)


def ray_shard_clients(handles: Sequence[Any]) -> ConnectShards:
    return lambda config, wait: [
        RemoteShard(RayShardChannel(handle, f"shard {index}"), config.fleet.reconnect_timeout_s, wait)
        for index, handle in enumerate(handles)]


def learner_job(host: RayHost, run_request: RunRequest, shards: Sequence[Any] = ()) -> int:
    """Job of the learner; with shards, of the coordinator."""
    try:
        with exclusive_writer(_require_directory(run_request)):
            learn(run_request, host.heartbeat, RayServing(host), ray_shard_clients(shards))
    except FINAL_ERRORS as error:
        host.message = describe_final_error(error)
        return EXIT_UNRECOVERABLE
    return EXIT_OK


def rank_job(host: RayHost, run_request: RunRequest, rank_info: RankInfo) -> int:
    """Job of a rank."""
    _require_directory(run_request)
    if (name := network_interface(node_address())) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)  # the host name may resolve to another interface
    return serve_rank(run_request, replace(rank_info, attempt=host.number), host.heartbeat, RayServing(host),
                      lambda text: setattr(host, "message", text))


def _require_directory(run_request: RunRequest) -> Path:
    run = Path(run_request.directory)
    if not run.is_dir():
        raise UserError(f"the node of the learner cannot read {run}: with ray.learner_any_node=true all nodes must "
                        "share the disk of run.root")
    return run


def actor_job(host: RayHost, endpoint: RayEndpoint) -> int:
    return run_actor(replace(endpoint, host_heartbeat=host.heartbeat))


def shard_job(host: RayHost, run_request: RunRequest, index: int) -> int:
    run = Path(run_request.directory)
    config = resolution.resolve(str(RunDirectory(run).config), []).config
    return serve_shard(
        config, run_request.spec, index, run / SHARDS, host.heartbeat,
        lambda service: serve_calls(host, service.methods))


def worker_job(host: RayHost, endpoint: RayEndpoint, run_request: RunRequest, shards: Sequence[Any]) -> int:
    return train_worker(replace(endpoint, host_heartbeat=host.heartbeat), Path(run_request.directory),
                        ray_shard_clients(shards), RayServing(host))


def evaluator_job(host: RayHost, endpoint: RayEndpoint, videos: str | None) -> int:
    return run_evaluator(replace(endpoint, host_heartbeat=host.heartbeat), None if videos is None else Path(videos))


