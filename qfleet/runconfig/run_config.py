"""The complete config of a run."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from qfleet.config import Config, Count, PositiveCount, Real, plugin
from qfleet.envs import EnvConfig
from qfleet.learner.learner import LearnerConfig
from qfleet.replay.config import ReplayConfig
from qfleet.runconfig.rules import contradictions
from qfleet.runs.directory import RunSection
from qfleet.sync.allreduce import AllReduceConfig
from qfleet.sync.ps_shard import ParameterServerConfig
from qfleet.training.checkpointer import CheckpointConfig
from qfleet.training.evaluation import EvalConfig
from qfleet.transport.fleet_config import FleetConfig
from qfleet.transport.ray_config import RayConfig

ALGO = plugin("qfleet.algos", "algo", "dqn")
EXPLORE = plugin("qfleet.explore", "kind", "linear")

SUPERVISION = ("heartbeat_timeout_s", "max_restarts", "restarts", "patience_s", "max_message_mb", "inbox_messages")
"""Keys of the fleet section that apply to all child processes."""


LISTEN_KEYS = ("listen", "advertise", "token_file", "tls_cert", "tls_key", "tls_ca", "local_actors", "max_members")
"""Keys of the fleet section for actors that join from other hosts."""

RAY_ACTORS = ("ray.elastic", "ray.actor_cpus", "ray.actor_gpus", "ray.actor_memory_mb", "ray.actor_resources")


class RunConfig(Config):
    """Config of a run. Each section is defined next to the code that reads it."""

    seed: Count = Field(1, le=2**31 - 1, description="seed of all random number generators of the run")
    device: str = Field("auto", description="device of the learner: auto (a GPU if there is one), cpu, cuda or cuda:N")
    total_steps: PositiveCount = Field(
        100_000, description="length of the run, environment steps summed over all lanes and learners")
    total_updates: PositiveCount | None = Field(
        None, description="stop after this many updates, if total_steps is not reached first; null = no limit")
    stop_at: Real | None = Field(
        None, description="stop when the mean return of an evaluation reaches this value; null = never")
    init_from: str | None = Field(
        None, description="run or checkpoint whose weights initialise the network; null = random weights")
    init_partial: bool = Field(
        False, description="load only the tensors of init_from whose name and shape match; for another network or "
                           "environment")
    placement: Literal["inline", "processes", "ray"] = Field(
        "inline", description="process layout: inline (actors in the learner's process), processes (one process per "
                              "actor; other hosts can join) or ray (a Ray cluster)")
    actors: PositiveCount = Field(
        1, description="actors per learner, each with env.lanes environments; placement=inline steps them in turn. "
                       "auto = as many as fit on the Ray cluster")
    gradients: Literal["solo", "allreduce", "server"] = Field(
        "solo", description="how several learners combine gradients: allreduce (synchronous average) or server "
                            "(asynchronous parameter server); solo = one learner")
    cells: PositiveCount = Field(1, description="number of learners, each with its own actors and its own replay")
    env: EnvConfig
    agent: Annotated[Any, ALGO] = Field(default_factory=ALGO.make, description="the algorithm and its hyperparameters")
    explore: Annotated[Any, EXPLORE] = Field(
        default_factory=EXPLORE.make, description="the exploration strategy of the actors")
    replay: ReplayConfig = ReplayConfig()
    learner: LearnerConfig = LearnerConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    run: RunSection = RunSection()
    fleet: FleetConfig = FleetConfig()
    allreduce: AllReduceConfig = AllReduceConfig()
    server: ParameterServerConfig = ParameterServerConfig()
    ray: RayConfig = RayConfig()

    @property
    def lanes(self) -> int:
        """Lanes of all actors of one learner."""
        return self.actors * self.env.lanes

    def waiting_steps(self, lanes: int) -> int:
        """Steps of `lanes` lanes that may wait for the learner: a fraction of the burst in which chunks arrive."""
        return max(1, lanes * self.replay.chunk_steps // 8)

    def inactive(self) -> dict[str, str]:
        idle = {} if self.init_from else {"init_partial": "without init_from"}
        if self.placement == "inline":
            alone = self.gradients == "solo" and not self.eval.beside
            why = "placement=inline starts no other processes" if alone else (
                "with eval.beside=true: only the evaluator is a separate process" if self.eval.beside else
                f"with gradients={self.gradients} every learner runs its own actors, on this host")
            idle |= dict.fromkeys([f"fleet.{name}" for name in FleetConfig.model_fields
                                   if alone or name not in SUPERVISION or (name == "restarts" and self.eval.beside)],
                                  why)
        if self.placement == "ray":
            idle |= dict.fromkeys(
                [f"fleet.{name}" for name in LISTEN_KEYS], "with placement=ray nodes join the cluster"
            )
            if self.gradients != "server":
                idle["ray.server_cpus"] = "unless gradients=server"
            if self.gradients != "solo":
                idle |= dict.fromkeys(RAY_ACTORS, f"with gradients={self.gradients} every learner runs its own actors")
            if self.gradients == "allreduce":
                idle["fleet.restarts"] = "ranks are restarted up to allreduce.max_restarts times"
        else:
            idle |= dict.fromkeys([f"ray.{name}" for name in RayConfig.model_fields], "unless placement=ray")
        rules: dict[str, type[Config]] = {"allreduce": AllReduceConfig, "server": ParameterServerConfig}
        for rule, model in rules.items():
            if self.gradients != rule:
                idle |= dict.fromkeys([f"{rule}.{name}" for name in model.model_fields], f"unless gradients={rule}")
        if self.placement != "inline" or self.gradients != "solo":
            idle["eval.beside"] = ("unless placement=inline gradients=solo: otherwise the evaluator is a separate "
                                   "process anyway")
        if self.device == "cpu" and self.learner.capture is True:
            idle["learner.capture"] = "with device=cpu: it captures updates as CUDA graphs"
        if self.gradients == "solo":
            idle["cells"] = "gradients=solo has one learner"
        return idle

    @field_validator("device")
    @classmethod
    def _known_device(cls, device: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
            raise ValueError("must be auto, cpu, cuda or cuda:N")
        return device

    @model_validator(mode="before")
    @classmethod
    def _expand_auto_actors(cls, data: Any) -> Any:
        """Expand `actors=auto` to `ray.elastic`; the number is determined when the cluster is known."""
        if not isinstance(data, dict) or data.get("actors") != "auto":
            return data
        if data.get("placement") != "ray":
            raise ValueError("actors=auto needs placement=ray: otherwise give a number")
        if data.get("gradients", "solo") != "solo":
            raise ValueError(f"actors=auto with gradients={data['gradients']}: every learner runs its own "
                             "actors; give their number")
        return data | {"actors": 1, "ray": dict(data.get("ray") or {}) | {"elastic": True}}

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        if found := contradictions(self):
            raise ValueError("\n".join(found))
        return self
