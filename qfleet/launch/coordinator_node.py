"""Main function of the coordinator of a parameter server."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from qfleet.launch.actor_service import ActorService
from qfleet.launch.coordinator import ConnectShards, Coordinator, connect_shards
from qfleet.launch.learner_main import exit_code, serve_run
from qfleet.launch.run_request import RunRequest
from qfleet.launch.serving import GrpcServing, RunServing
from qfleet.launch.topology import actor_assignment
from qfleet.process.heartbeat import Heartbeat, HeartbeatSender
from qfleet.process.signals import exit_on_signal
from qfleet.runconfig.build import make_agent, make_plan
from qfleet.runconfig.run_config import RunConfig
from qfleet.training.learner_core import Hooks

log = logging.getLogger(__name__)


def run_coordinator(private: Path) -> int:
    """Main function of a coordinator on this host."""
    run_request, heartbeat = RunRequest.read(private), HeartbeatSender.from_env()
    with exit_on_signal(sys.exit):  # before there is anything to save
        return serve_coordinator(run_request, heartbeat, GrpcServing(private), connect_shards(private), log.error)


def serve_coordinator(run_request: RunRequest, heartbeat: Heartbeat | None, serving: RunServing,
                      connect: ConnectShards, report_error: Callable[[str], object]) -> int:
    """Coordinate workers and shards until the run ends; returns the exit code."""
    def build(config: RunConfig, run_request: RunRequest, service: ActorService, hooks: Hooks) -> Coordinator:
        plan = replace(make_plan(config), device=torch.device("cpu"))
        return Coordinator(service.setup(make_agent(config, service.spec)), plan, hooks, partial(connect, config),
                           actor_assignment(config).learners, run_request.run.path / "parts")

    return exit_code(lambda: serve_run(run_request, heartbeat, serving, build, takes_experience=False), report_error)
