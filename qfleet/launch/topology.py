"""Topology of a run: the nodes (processes) that a config asks for, and the services that they call.

    sync=none        actors ──▶ learner ◀── evaluator
    sync=allreduce   actors ──▶ learners, one restart group ◀── evaluator       the evaluator calls learner 0
    sync=server      actors ──▶ learners ──▶ coordinator, shards                the evaluator calls the coordinator

With actors=0 learners step their own environments; otherwise actor i feeds learner i mod K. Launchers and the driver
read nodes, and no numbers of processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from qfleet.runconfig.run_config import RunConfig

REBUILD_S = 120.0
"""Seconds that the process of an isolated environment may take to start."""

SINGLE_HINT = "replay.capacity or learner.batch_size"
WORKER_HINT = "learners, env.lanes or replay.capacity"
PARAMETER_HINT = "agent.hidden"
ACTING_HINT = "env.lanes or actors"
"""Config keys to lower if a process is killed for lack of memory."""

LEARNER_GROUP = "learners"


class Role(StrEnum):
    """Role of a node."""

    LEARNER = "learner"
    ACTOR = "actor"
    EVALUATOR = "evaluator"
    SHARD = "shard"
    COORDINATOR = "coordinator"


@dataclass(frozen=True)
class Node:
    """One process of a run.

    Attributes:
        role: What the process does.
        index: Number among the nodes of its role.
        name: Name of the node, such as `actor/0`.
        main: Main function: learner, rank (a learner of a process group, perhaps of one), worker (a learner of a
            parameter server), coordinator, shard, actor or evaluator.
        calls: Nodes whose services it uses; the first one receives its messages.
        resources: Resources to reserve on a cluster.
        memory_hint: Config keys to lower if it is OOM-killed.
        max_restarts: Limit of all restarts of the node or its group; None = the supervisor's limit of restarts in a
            row.
        heartbeat_timeout_s: None = the supervisor's.
        group: Nodes of one group start, fail and restart together.
    """

    role: Role
    index: int
    name: str
    main: str
    calls: tuple[str, ...]
    resources: Mapping[str, float]
    memory_hint: str
    max_restarts: int | None = None
    heartbeat_timeout_s: float | None = None
    group: str | None = None

    @property
    def child_name(self) -> str:
        """Name under which it is supervised."""
        return self.group or self.name

    def log_path(self, run: Path) -> Path:
        """Log file of the node.

        Args:
            run: Run directory.

        Returns:
            Path of the file.
        """
        return run / "logs" / f"{self.name.replace('/', '-')}.log"


@dataclass(frozen=True)
class ActorAssignment:
    """How the actors of a run are divided among its learners, and at which service each learner is reached.

    `actors` include those that join from other hosts. The main service, where these register first, is the
    coordinator's or, without one, that of learner 0; every other learner has a service of its own.
    """

    actors: int
    learners: int
    has_coordinator: bool

    @property
    def actors_per_learner(self) -> int:
        """Actors of one learner, the largest number if they cannot be divided evenly."""
        return -(-self.actors // self.learners)

    def learner_of(self, actor: int) -> int:
        """Index of the learner that receives the transitions of an actor."""
        return actor % self.learners

    def own_service(self, learner: int) -> int | None:
        """Index of a learner's own service; None if it answers at the main service."""
        return learner if learner or self.has_coordinator else None


def actor_assignment(config: RunConfig) -> ActorAssignment:
    return ActorAssignment(config.actors, config.learners, config.has_server)


def topology(config: RunConfig) -> tuple[Node, ...]:
    """All nodes of a run. The run ends when the first one, or its group, ends."""
    shards = tuple(_shard(config, index) for index in range(config.parameter_server.shards * config.has_server))
    center = (_coordinator(config, shards),) if config.has_server else ()
    services = tuple(node.name for node in (*center, *shards))
    learners = tuple(_learner(config, index, services) for index in range(config.learners))
    actors = tuple(actor_node(config, index) for index in range(config.actors * config.fleet.local_actors))
    first = (*center, *learners)[0]
    evaluators = (_evaluator(config, first.name),) if config.evaluator_process else ()
    return (*center, *shards, *learners, *actors, *evaluators)


def actor_node(config: RunConfig, index: int) -> Node:
    """Actor `index`, whose transitions go to learner `index` mod K."""
    learner = actor_assignment(config).learner_of(index)
    return Node(
        Role.ACTOR, index, f"actor/{index}", "actor", (_learner_name(config, learner),),
        config.ray.resources("actor", config.device), ACTING_HINT, heartbeat_timeout_s=heartbeat_timeout_of(config))


def with_actors(config: RunConfig, number: int) -> RunConfig:
    """Config with another number of actors."""
    return config.model_copy(update={"actors": number})


def count(nodes: Iterable[Node], role: Role) -> int:
    return sum(node.role is role for node in nodes)


def heartbeat_timeout_of(config: RunConfig) -> float:
    """Heartbeat timeout of an acting process.

    Longer if its environment is isolated, which replaces a hung one itself.
    """
    env = config.env
    return config.fleet.heartbeat_timeout_s + (env.step_timeout_s + REBUILD_S) * env.isolate


def _learner_name(config: RunConfig, index: int) -> str:
    return f"learner/{index}" if config.learners > 1 or config.has_server else "learner"


def _learner(config: RunConfig, index: int, services: tuple[str, ...]) -> Node:
    name, resources = _learner_name(config, index), config.ray.resources("learner", config.device)
    if config.has_server:
        return Node(Role.LEARNER, index, name, "worker", services, resources, WORKER_HINT,
                    heartbeat_timeout_s=heartbeat_timeout_of(config))
    if config.has_ranks or config.learners_act:
        return Node(Role.LEARNER, index, name, "rank", (), resources, SINGLE_HINT, config.allreduce.max_restarts,
                    group=LEARNER_GROUP if config.learners > 1 else None)
    return Node(Role.LEARNER, index, name, "learner", (), resources, SINGLE_HINT, config.fleet.learner_restarts)


def _coordinator(config: RunConfig, shards: tuple[Node, ...]) -> Node:
    return Node(Role.COORDINATOR, 0, "coordinator", "coordinator", tuple(shard.name for shard in shards),
                config.ray.resources("server", config.device), PARAMETER_HINT, config.fleet.learner_restarts)


def _shard(config: RunConfig, index: int) -> Node:
    return Node(Role.SHARD, index, f"shard/{index}", "shard", (), config.ray.resources("server", config.device),
                PARAMETER_HINT)


def _evaluator(config: RunConfig, learner: str) -> Node:
    resources = config.ray.resources("evaluator", config.device)
    return Node(Role.EVALUATOR, 0, "evaluator", "evaluator", (learner,), resources,
                WORKER_HINT if config.has_server else ACTING_HINT, heartbeat_timeout_s=heartbeat_timeout_of(config))
