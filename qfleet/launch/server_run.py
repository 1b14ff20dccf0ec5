"""Driver of an asynchronous parameter-server run.

    driver ──▶ coordinator    run directory, clock, end, checkpoints     shards ⇄ workers: gradients up, weights down
           ──▶ shards         weights and optimizer, one slice each      workers, evaluator ──▶ coordinator: progress
           ──▶ workers        actors, learner and replay in one process
           ──▶ evaluator      evaluates the weights that the coordinator has collected
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from qfleet.launch import driver
from qfleet.launch.attempt import TrainResult
from qfleet.process.handle import child_environment
from qfleet.process.supervisor import ChildSpec
from qfleet.runconfig.run_config import RunConfig
from qfleet.runs.directory import RunDirectory
from qfleet.training.meter import Sink


def start(config: RunConfig, sinks: Sequence[Sink], provenance: Mapping[str, str]) -> TrainResult:
    """Train a new run."""
    return driver.start(config, sinks, provenance, ServerDriver)


def resume(directory: RunDirectory, config: RunConfig, sinks: Sequence[Sink]) -> TrainResult:
    """Continue a run from its newest valid checkpoint, with the configured numbers of learners and shards."""
    return driver.resume(directory, config, sinks, ServerDriver)


class ServerDriver(driver.Driver):
    """Driver with several workers. Any child that dies is replaced; only the coordinator is indispensable."""

    main_child = "coordinator"

    def _children(self) -> list[ChildSpec]:
        config, logs = self.config, self.directory.path / "logs"
        argv = [sys.executable, "-m", "qfleet", "_member"]
        env = child_environment()
        coordinator = ChildSpec(self.main_child, [*argv, driver.LEARNER, str(self.private)], env,
                                logs / "coordinator.log", config.fleet.learner_restarts, "agent.hidden")
        shards = [ChildSpec(name, [*argv, "shard", str(self.private), name], env, _log(self.directory, name),
                            memory_hint="agent.hidden")
                  for name in (f"shard/{index}" for index in range(config.parameter_server.shards))]
        clients: list[tuple[str, str, list[str]]] = [
            *(("worker", f"learner/{index}", []) for index in range(config.learners)),
            ("evaluator", "evaluator", self._video_args())]
        return [
            coordinator,
            *shards,
            *(
                ChildSpec(
                    name, [*argv, role, *self._endpoint_of(name).to_argv(), *extra_args], env,
                    _log(self.directory, name), memory_hint="learners, env.lanes or replay.capacity",
                    silence_s=driver.heartbeat_timeout_of(self.config))
                for role, name, extra_args in clients
            ),
        ]


def _log(directory: RunDirectory, name: str) -> Any:
    return directory.path / "logs" / f"{name.replace('/', '-')}.log"
