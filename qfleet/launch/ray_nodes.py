"""What the Ray actors of a run do: each function is a job, in a thread of its `Host`, and calls come to it by Ray.

A cell learns from what actors send (`lead`); ranks play, learn and average their gradients (`average`); cells of a
parameter server play, learn and push (`bundle`) to those who hold its shards (`hold_shard`).
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qfleet.core.errors import RunLost, UserError
from qfleet.launch.actor_node import heartbeat_thread, run_actor, run_evaluator
from qfleet.launch.allreduce_run import RankContext, train_rank
from qfleet.launch.attempt import TrainResult
from qfleet.launch.learner_node import RunRequest, exclusive_writer, learn, result_json
from qfleet.launch.ray_handle import EXIT_PEER_LOST
from qfleet.launch.ray_session import node_address
from qfleet.launch.shard_node import serve_shard
from qfleet.launch.worker_node import train_worker
from qfleet.learner.learner import Diverged
from qfleet.process.heartbeat import Heartbeat
from qfleet.process.supervisor import EXIT_OK, EXIT_UNRECOVERABLE
from qfleet.runconfig import resolution
from qfleet.runconfig.run_config import RunConfig
from qfleet.runs.directory import RunDirectory
from qfleet.sync.process_group import RankInfo, RankLost, network_interface
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
    """The `Way` of a Ray actor to its cell, which is another."""

    learner: Any
    name: str
    address: str
    patience_s: float
    cores: int
    line: Heartbeat | None = None
    trusted: bool = True  # whoever may call Ray actors may do anything here

    def heartbeat(self) -> Heartbeat | None:
        return self.line

    def connect(self, role: str) -> FleetConnection:
        return FleetConnection(RayChannel(self.learner, self.address), self.name, role, self.patience_s)


class RayServing:
    """A cell's: calls come to its Ray actor, which keeps its result for whoever looks."""

    def __init__(self, host: RayHost) -> None:
        self._host = host

    @contextmanager
    def __call__(self, desk: PublishedState, registry: Registry, inbox: Inbox, config: RunConfig) -> Iterator[None]:
        with serve_calls(
            self._host, fleet_methods(FleetService(desk, registry, inbox, config.fleet.max_message_bytes))
        ):
            yield

    def report_result(self, result: TrainResult) -> None:
        self._host.message = result_json(result)


def ray_shard_clients(handles: Sequence[Any]) -> Callable[[RunConfig], list[RemoteShard]]:
    return lambda config: [RemoteShard(RayShardChannel(handle, f"shard {index}"), config.fleet.patience_s)
                           for index, handle in enumerate(handles)]


def learner_job(host: RayHost, run_request: RunRequest, shards: Sequence[Any] = ()) -> int:
    """What the cell's Ray actor does; or the registrar's, where there are shards."""
    try:
        with exclusive_writer(_seen(run_request)):
            learn(run_request, host.heartbeat, RayServing(host), ray_shard_clients(shards))
    except (Diverged, RunLost) as error:
        host.message = f"training failed: {error}"
        return EXIT_UNRECOVERABLE
    return EXIT_OK


def rank_job(host: RayHost, run_request: RunRequest, place: RankInfo) -> int:
    """Be a rank. The first one keeps directory, records and checkpoints, and hears the evaluator."""
    first = place.rank == 0
    run, reception = _seen(run_request), RayServing(host)
    if (name := network_interface(node_address())) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)  # the name of a host may mean another of its addresses
    over = heartbeat_thread(host.heartbeat, math.inf)  # that it goes forward, too, the ranks see from each other
    try:
        with exclusive_writer(run) if first else nullcontext():
            result = train_rank(
                run_request,
                RankContext(replace(place, attempt=host.number), host.heartbeat, reception if first else None))
        if first:
            reception.report_result(result)
    except (Diverged, RunLost) as error:
        host.message = f"training failed: {error}"
        return EXIT_UNRECOVERABLE
    except RankLost as error:
        host.message = str(error)
        return EXIT_PEER_LOST
    finally:
        over.set()
    return EXIT_OK


def _seen(run_request: RunRequest) -> Path:
    run = Path(run_request.directory)
    if not run.is_dir():
        raise UserError(f"the node of the learner does not see {run}: with ray.cell_anywhere=true all nodes must share "
                        "the disk of run.root")
    return run


def actor_job(host: RayHost, endpoint: RayEndpoint) -> int:
    return run_actor(replace(endpoint, line=host.heartbeat))


def shard_job(host: RayHost, run_request: RunRequest, index: int) -> int:
    run = Path(run_request.directory)
    config = resolution.resolve(str(RunDirectory(run).config), []).config
    return serve_shard(
        config, run_request.spec, index, run / SHARDS, host.heartbeat,
        lambda service: serve_calls(host, service.methods))


def worker_job(host: RayHost, endpoint: RayEndpoint, run_request: RunRequest, shards: Sequence[Any]) -> int:
    return train_worker(replace(endpoint, line=host.heartbeat), Path(run_request.directory), ray_shard_clients(shards))


def evaluator_job(host: RayHost, endpoint: RayEndpoint, videos: str | None) -> int:
    return run_evaluator(replace(endpoint, line=host.heartbeat), None if videos is None else Path(videos))


