"""The complete config of a run."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from qfleet.algos.normalisation import NormaliseConfig
from qfleet.config import Config, Count, PluginName, PositiveCount, Real, plugin
from qfleet.envs import EnvConfig
from qfleet.learner.learner import LearnerConfig
from qfleet.replay.config import ReplayConfig
from qfleet.runconfig.launcher_traits import LauncherTraits, traits_of
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
    callbacks: tuple[Annotated[str, PluginName(None)], ...] = Field(
        (), examples=["[my_module:Success]"],
        description="callbacks of your own, each as module:attribute; the attribute is a class or an object with "
                    "methods such as on_evaluation(run, evaluation). They run in the learner's process")
    actors: Count = Field(
        0, description="actor processes of the whole run, each with env.groups x env.lanes environments; 0 = the "
                       "learner process also acts. auto = as many as fit on the Ray cluster")
    learners: PositiveCount = Field(
        1, description="learner processes, each with its own replay. More than one needs sync. Actor i feeds learner i "
                       "mod learners; with actors=0 every learner steps its own environments")
    sync: Annotated[str, PluginName(None, ("none", "allreduce", "server"))] = Field(
        "none", description="how several learners combine gradients: allreduce (synchronous average), server "
                            "(asynchronous parameter server), or your own for synchronous ranks, as module:attribute; "
                            "none = one learner")
    launcher: Annotated[str, PluginName(None, ("local", "ray"))] = Field(
        "local", description="what starts the processes: local (on this host; actors of other hosts can join), ray "
                             "(on a Ray cluster), or your own, as module:attribute")
    env: EnvConfig
    agent: Annotated[Any, ALGO] = Field(default_factory=ALGO.make, description="the algorithm and its hyperparameters")
    explore: Annotated[Any, EXPLORE] = Field(
        default_factory=EXPLORE.make, description="the exploration strategy of the actors")
    normalise: NormaliseConfig = NormaliseConfig()
    replay: ReplayConfig = ReplayConfig()
    learner: LearnerConfig = LearnerConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    run: RunSection = RunSection()
    fleet: FleetConfig = FleetConfig()
    allreduce: AllReduceConfig = AllReduceConfig()
    parameter_server: ParameterServerConfig = ParameterServerConfig()
    ray: RayConfig = RayConfig()

    @property
    def learners_act(self) -> bool:
        """True if learner processes step their own environments; False if actors are separate processes."""
        return self.actors == 0

    @property
    def process_lanes(self) -> int:
        """Lanes of one acting process."""
        return self.env.groups * self.env.lanes

    @property
    def lanes(self) -> int:
        """Lanes that feed one learner, the largest number if actors cannot be divided evenly."""
        return max(1, -(-self.actors // self.learners)) * self.process_lanes

    @property
    def total_lanes(self) -> int:
        """Lanes of the whole run, without actors that join."""
        return (self.actors or self.learners) * self.process_lanes

    @property
    def evaluator_process(self) -> bool:
        """True if evaluations run in a separate process."""
        if self.eval.process != "auto":
            return self.eval.process
        return self.has_driver

    @property
    def has_children(self) -> bool:
        """True if actors, several learners or a parameter server need processes besides the learner's."""
        return not self.learners_act or self.learners > 1 or self.has_server

    @property
    def launcher_traits(self) -> LauncherTraits:
        """Properties of the launcher that other settings depend on."""
        return traits_of(self.launcher, self.ray)

    @property
    def has_server(self) -> bool:
        """True if a parameter server holds the weights."""
        return self.sync == "server"

    @property
    def services(self) -> int:
        """Number of services of the run, each with its own port: one per learner, and the coordinator's."""
        return self.learners + self.has_server

    @property
    def has_ranks(self) -> bool:
        """True if learners are ranks of a process group; with another launcher than local, one that acts is a group."""
        return self.synchronous or (not self.is_local and self.learners_act and not self.has_server)

    @property
    def synchronous(self) -> bool:
        """True if learners make every update together: sync=allreduce, or a rule of the user."""
        return self.sync not in ("none", "server")

    @property
    def is_local(self) -> bool:
        """True with launcher=local."""
        return self.launcher == "local"

    @property
    def has_driver(self) -> bool:
        """True if this process only starts and supervises the processes of the run."""
        return self.has_children or not self.is_local

    def process_settings(self) -> list[str]:
        """Settings, as `key=value`, because of which the run starts other processes."""
        given = {f"actors={self.actors}": not self.learners_act, f"sync={self.sync}": self.sync != "none",
                 f"launcher={self.launcher}": not self.is_local, "eval.process=true": self.evaluator_process}
        return [text for text, starts in given.items() if starts]

    def waiting_steps(self, lanes: int) -> int:
        """Steps of `lanes` lanes that may wait for the learner: a fraction of the burst in which chunks arrive."""
        return max(1, lanes * self.replay.chunk_steps // 8)

    def inactive(self) -> dict[str, str]:
        idle = {} if self.init_from else {"init_partial": "without init_from"}
        idle |= self._inactive_ray() | self._inactive_fleet()
        rules: list[tuple[bool, str, str, type[Config]]] = [
            (self.synchronous, "allreduce", "allreduce", AllReduceConfig),
            (self.has_server, "server", "parameter_server", ParameterServerConfig)]
        for active, rule, section, model in rules:
            if not active:
                idle |= dict.fromkeys([f"{section}.{name}" for name in model.model_fields], f"unless sync={rule}")
        if self.device == "cpu" and self.learner.capture is True:
            idle["learner.capture"] = "with device=cpu: it captures updates as CUDA graphs"
        return idle

    def _inactive_fleet(self) -> dict[str, str]:
        """Keys of the fleet section without effect: there are no other processes, or none that join."""
        # torchrun or srun may start more ranks than `learners` says.
        children = self.evaluator_process or self.has_children or self.synchronous
        idle: dict[str, str] = {}
        if not children:
            return dict.fromkeys([f"fleet.{name}" for name in FleetConfig.model_fields],
                                 "with actors=0 and one learner, which starts no other processes")
        if self.learners_act:
            why = "with actors=0: every learner steps its own environments"
            idle |= dict.fromkeys([f"fleet.{name}" for name in LISTEN_KEYS], why)
        if self.launcher_traits.cluster is not None:
            idle |= dict.fromkeys([f"fleet.{name}" for name in LISTEN_KEYS], "with launcher=ray nodes join the cluster")
        if self.synchronous:
            idle["fleet.learner_restarts"] = "learners are restarted up to allreduce.max_restarts times"
        elif not self.has_driver:
            idle["fleet.learner_restarts"] = "with actors=0 and one learner: this process trains"
        return idle

    def _inactive_ray(self) -> dict[str, str]:
        """Keys of the ray section without effect."""
        if self.launcher != "ray":
            return dict.fromkeys([f"ray.{name}" for name in RayConfig.model_fields], "unless launcher=ray")
        idle = {} if self.has_server else {"ray.server_cpus": "unless sync=server"}
        if self.learners_act:
            idle |= dict.fromkeys(RAY_ACTORS, "with actors=0: every learner steps its own environments")
        if not self.evaluator_process:
            idle["ray.evaluator_cpus"] = "with eval.process=false"
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
        if data.get("launcher") != "ray":
            raise ValueError("actors=auto needs launcher=ray: otherwise give a number")
        if data.get("learners", 1) != 1:
            raise ValueError(f"actors=auto with learners={data['learners']}: give the number of actors")
        return data | {"actors": 1, "ray": dict(data.get("ray") or {}) | {"elastic": True}}

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        if found := contradictions(self):
            raise ValueError("\n".join(found))
        return self
