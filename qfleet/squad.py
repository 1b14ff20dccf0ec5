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

from qfleet import head
from qfleet.roles.metrics import Sink
from qfleet.runs.directory import RunDirectory
from qfleet.runtime.life import surroundings
from qfleet.runtime.supervise import Child
from qfleet.session import TrainResult
from qfleet.settings import RunConfig


def start(config: RunConfig, sinks: Sequence[Sink], provenance: Mapping[str, str]) -> TrainResult:
    """Train a new run."""
    return head.start(config, sinks, provenance, Squad)


def go_on(directory: RunDirectory, config: RunConfig, sinks: Sequence[Sink]) -> TrainResult:
    """Continue a run from its newest valid checkpoint, with as many cells and shards as there shall be now."""
    return head.go_on(directory, config, sinks, Squad)


class Squad(head.Head):
    """A head whose cells are several. Whoever dies is replaced; only without the registrar nothing goes on."""

    main = "registrar"

    def _children(self) -> list[Child]:
        config, logs = self.config, self.directory.path / "logs"
        words = [sys.executable, "-m", "qfleet", "_member"]
        env = surroundings()
        registrar = Child(self.main, [*words, head.CELL, str(self.private)], env, logs / "registrar.log",
                          config.fleet.restarts, "agent.hidden")
        shards = [Child(name, [*words, "shard", str(self.private), name], env, _log(self.directory, name),
                        appetite="agent.hidden")
                  for name in (f"shard/{index}" for index in range(config.server.shards))]
        members: list[tuple[str, str, list[str]]] = [
            *(("bundle", f"cell/{index}", []) for index in range(config.cells)),
            ("evaluator", "evaluator", self._films())]
        return [registrar, *shards, *(
            Child(name, [*words, role, *self._contact(name).words(), *more], env, _log(self.directory, name),
                  appetite="cells, env.lanes or replay.capacity", silence_s=head.silence_s(self.config))
            for role, name, more in members)]


def _log(directory: RunDirectory, name: str) -> Any:
    return directory.path / "logs" / f"{name.replace('/', '-')}.log"
