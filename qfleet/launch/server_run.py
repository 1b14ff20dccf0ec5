"""Runs whose learners meet at a parameter server: who starts its shards, its cells and its registrar.

    head ──▶ registrar        run directory, clock, end, checkpoints        shards ⇄ cells: gradients up, weights down
         ──▶ shards           weights and optimizer, a slice each           cells, evaluator ──▶ registrar: their deeds
         ──▶ cells            actors, learner and replay, all in one process
         ──▶ evaluator        plays with the weights that the registrar has collected
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
    """Continue a run from its newest valid checkpoint, with as many cells and shards as there shall be now."""
    return driver.resume(directory, config, sinks, ServerDriver)


class ServerDriver(driver.Driver):
    """A head whose cells are several. Whoever dies is replaced; only without the registrar nothing goes on."""

    main_child = "registrar"

    def _children(self) -> list[ChildSpec]:
        config, logs = self.config, self.directory.path / "logs"
        words = [sys.executable, "-m", "qfleet", "_member"]
        env = child_environment()
        registrar = ChildSpec(self.main_child, [*words, driver.LEARNER, str(self.private)], env, logs / "registrar.log",
                              config.fleet.restarts, "agent.hidden")
        shards = [ChildSpec(name, [*words, "shard", str(self.private), name], env, _log(self.directory, name),
                            memory_hint="agent.hidden")
                  for name in (f"shard/{index}" for index in range(config.server.shards))]
        members: list[tuple[str, str, list[str]]] = [
            *(("bundle", f"cell/{index}", []) for index in range(config.cells)),
            ("evaluator", "evaluator", self._video_args())]
        return [
            registrar,
            *shards,
            *(
                ChildSpec(
                    name, [*words, role, *self._endpoint_of(name).to_argv(), *more], env,
                    _log(self.directory, name), memory_hint="cells, env.lanes or replay.capacity",
                    silence_s=driver.heartbeat_timeout_of(self.config))
                for role, name, more in members
            ),
        ]


def _log(directory: RunDirectory, name: str) -> Any:
    return directory.path / "logs" / f"{name.replace('/', '-')}.log"
