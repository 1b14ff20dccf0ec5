"""Main function of a parameter-server shard process."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from qfleet.core.env import EnvSpec
from qfleet.launch.run_request import RunRequest, shard_socket
from qfleet.optim.flat_params import is_finite
from qfleet.optim.optimizer import (
    ParamShape,
    ParamSlice,
    param_shapes_of,
    param_slices_of,
    shapes_within,
    slices_within,
    split_evenly,
)
from qfleet.process.heartbeat import Heartbeat, HeartbeatSender
from qfleet.process.signals import EXIT_CODES, exit_on_signal
from qfleet.runconfig.build import make_agent
from qfleet.runconfig.run_config import RunConfig
from qfleet.sync.ps_shard import Shard
from qfleet.transport.security import read_token
from qfleet.transport.shard_pb2 import State
from qfleet.transport.shard_service import ShardServer, ShardService, pack_shard

log = logging.getLogger(__name__)


QUIET_S = 2.0
"""A shard that is asked to stop serves until no call has arrived for this long: a checkpoint may still need it."""


def run_shard(private: Path, index: int) -> int:
    """Main function of a shard on this host."""
    run_request = RunRequest.read(private)
    config = run_request.config()

    def serve(service: ShardService) -> ShardServer:
        return ShardServer(service, shard_socket(private, index), read_token(private / RunRequest.TOKEN_FILE),
                           config.fleet.max_message_bytes)

    return serve_shard(config, run_request.spec, index, private, HeartbeatSender.from_env(), serve)


def serve_shard(config: RunConfig, spec: Mapping[str, Any], index: int, folder: Path, heartbeat: Heartbeat | None,
                serve: Callable[[ShardService], AbstractContextManager[object]]) -> int:
    """Hold a slice of the weights until the run ends. A restarted shard loads the last snapshot in the folder."""
    torch.set_num_threads(1)
    snapshot_file, optimizer, server = folder / f"shard-{index}.state", config.learner, config.parameter_server
    slices, shapes = _params_of_shard(config, EnvSpec.from_json(spec), index)
    writing = threading.Lock()

    def build(state: Mapping[str, Any]) -> Shard:
        shard = Shard(f"shard {index}", state["weights"], optimizer, server, slices, shapes)
        shard.load_state_dict(state)
        return shard

    def save_snapshot(state: State) -> None:
        fresh = snapshot_file.with_suffix(".new")
        with writing:
            fresh.write_bytes(state.SerializeToString())
            os.replace(fresh, snapshot_file)

    service = ShardService(build, save_snapshot)
    if snapshot_file.exists():
        snapshot = State.FromString(snapshot_file.read_bytes())
        service.restore(snapshot)
        log.info("restored at version %d", snapshot.version)
    stop_requested = threading.Event()
    if heartbeat is not None:
        heartbeat.on_orphan(stop_requested.set)
    with exit_on_signal(stop_requested.set), serve(service):
        snapshotter = ShardSnapshotter(service, server.snapshot_period_updates, save_snapshot)
        while not service.leaving and not (stop_requested.is_set() and time.monotonic() - service.called_at > QUIET_S):
            if heartbeat is not None:
                heartbeat.beat()
            snapshotter.step()
            time.sleep(0.02)
    return 0 if service.leaving else EXIT_CODES["preempted"]


def _params_of_shard(config: RunConfig, spec: EnvSpec,
                     index: int) -> tuple[tuple[ParamSlice, ...], tuple[ParamShape, ...]]:
    """Parameters of this shard with their own learning rates, and all of them; both empty if they do not matter."""
    agent = make_agent(config, spec)
    if not agent.param_groups and config.learner.optimizer in ("adam", "rmsprop"):
        return (), ()
    net = agent.network()
    size = sum(parameter.numel() for parameter in net.parameters())
    piece = split_evenly(size, config.parameter_server.shards)[index]
    return (slices_within(param_slices_of(net, agent.param_groups), piece),
            shapes_within(param_shapes_of(net), piece))


class ShardSnapshotter:
    """Writes a snapshot of a shard to disk every `period` updates. A state that was just loaded is there already."""

    def __init__(self, service: ShardService, period: int, save: Callable[[State], None]) -> None:
        self.service, self.period, self.save = service, period, save
        self._epoch, self._version = "", 0

    def step(self) -> None:
        shard = self.service.shard
        if shard is None:
            return
        if shard.epoch != self._epoch:
            self._epoch, self._version = shard.epoch, shard.version
        if shard.version - self._version < self.period:
            return
        self._version = shard.version
        held = shard.state_dict()
        if not is_finite(held["weights"]):  # keep the previous snapshot to restore from
            return
        state = pack_shard(held)
        try:
            if self.service.shard is shard:  # not replaced by a load meanwhile
                self.save(state)
        except OSError as error:
            log.warning("the snapshot of the shard could not be written (%s); a restart would lose more updates", error)
