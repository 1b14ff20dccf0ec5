"""Main function of a learner whose actors are other processes."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path

from qfleet.launch.actor_service import ActorService
from qfleet.launch.learner_main import exit_code, serve_run
from qfleet.launch.run_request import RunRequest
from qfleet.launch.serving import GrpcServing, RunServing
from qfleet.process.heartbeat import Heartbeat, HeartbeatSender
from qfleet.process.signals import exit_on_signal
from qfleet.runconfig.build import make_agent, make_plan
from qfleet.runconfig.run_config import RunConfig
from qfleet.training.learner_core import Hooks
from qfleet.training.learner_run import LearnerRun

log = logging.getLogger(__name__)


def run_learner(private: Path) -> int:
    """Main function of a learner on this host."""
    run_request, heartbeat = RunRequest.read(private), HeartbeatSender.from_env()
    with exit_on_signal(sys.exit):  # before there is anything to save
        return serve_learner(run_request, heartbeat, GrpcServing(private), log.error)


def serve_learner(run_request: RunRequest, heartbeat: Heartbeat | None, serving: RunServing,
                  report_error: Callable[[str], object]) -> int:
    """Train on what actors send until the run ends; returns the exit code."""
    return exit_code(lambda: serve_run(run_request, heartbeat, serving, _build), report_error)


def _build(config: RunConfig, run_request: RunRequest, service: ActorService, hooks: Hooks) -> LearnerRun:
    return LearnerRun(service.setup(make_agent(config, service.spec)), make_plan(config), hooks)
