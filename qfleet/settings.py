"""The whole config of a run, and which of its values contradict each other."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from qfleet.config import Config, Count, PositiveCount, Real, plugin, plugin_module
from qfleet.envs import EnvConfig
from qfleet.replay.config import ReplayConfig
from qfleet.roles.allreduce import AllReduceConfig
from qfleet.roles.checkpointer import CheckpointConfig
from qfleet.roles.evaluator import EvalConfig
from qfleet.roles.learner import LearnerConfig
from qfleet.roles.server import ParameterServerConfig
from qfleet.runs.directory import RunSection
from qfleet.runtime.cluster.config import RayConfig
from qfleet.runtime.wire.config import FleetConfig
from qfleet.types import EnvSpec, UserError, Window

ALGO = plugin("qfleet.algos", "algo", "dqn")
EXPLORE = plugin("qfleet.explore", "kind", "linear")

SUPERVISION = ("heartbeat_timeout_s", "max_restarts", "restarts", "patience_s", "max_message_mb", "inbox_messages")
"""What of the fleet section holds for all processes that we start."""

EPSILONS = {"constant": "epsilon", "exponential": "start", "linear": "start", "ladder": "base"}
"""Which key of an exploration says how much there is of it."""

LISTEN_KEYS = ("listen", "advertise", "token_file", "tls_cert", "tls_key", "tls_ca", "local_actors", "max_members")
"""What of it is for actors that join from elsewhere."""

RAY_ACTORS = ("ray.elastic", "ray.actor_cpus", "ray.actor_gpus", "ray.actor_memory_mb", "ray.actor_resources")

EXACT_STEPS_PER_LANE = 1000
"""Exact resume ends every episode at a checkpoint: below so many steps between two, too few would end by themselves."""


class RunConfig(Config):
    """The config of a run. Each section is defined next to the code that reads it."""

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
        """Lanes of all actors of a cell together."""
        return self.actors * self.env.lanes

    def waiting_steps(self, lanes: int) -> int:
        """How many steps of so many lanes may wait for the learner: a part of the burst in which their chunks come."""
        return max(1, lanes * self.replay.chunk_steps // 8)

    def inactive(self) -> dict[str, str]:
        idle = {} if self.init_from else {"init_partial": "without init_from"}
        if self.placement == "inline":
            alone = self.gradients == "solo" and not self.eval.beside
            why = "placement=inline has no other processes" if alone else (
                "of eval.beside=true only the evaluator is another process" if self.eval.beside else
                f"with gradients={self.gradients} every learner plays for itself, on this host")
            idle |= dict.fromkeys([f"fleet.{name}" for name in FleetConfig.model_fields
                                   if alone or name not in SUPERVISION or (name == "restarts" and self.eval.beside)],
                                  why)
        if self.placement == "ray":
            idle |= dict.fromkeys([f"fleet.{name}" for name in LISTEN_KEYS], "with placement=ray nodes join the cluster")
            if self.gradients != "server":
                idle["ray.server_cpus"] = "unless gradients=server"
            if self.gradients != "solo":
                idle |= dict.fromkeys(RAY_ACTORS, f"with gradients={self.gradients} every cell plays for itself")
            if self.gradients == "allreduce":
                idle["fleet.restarts"] = "ranks are started anew allreduce.max_restarts times"
        else:
            idle |= dict.fromkeys([f"ray.{name}" for name in RayConfig.model_fields], "unless placement=ray")
        rules: dict[str, type[Config]] = {"allreduce": AllReduceConfig, "server": ParameterServerConfig}
        for rule, model in rules.items():
            if self.gradients != rule:
                idle |= dict.fromkeys([f"{rule}.{name}" for name in model.model_fields], f"unless gradients={rule}")
        if self.placement != "inline" or self.gradients != "solo":
            idle["eval.beside"] = "unless placement=inline gradients=solo: elsewhere evaluators are processes anyway"
        if self.device == "cpu" and self.learner.capture is True:
            idle["learner.capture"] = "with device=cpu: updates are recorded as CUDA graphs only"
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
    def _as_many_as_there_is_room_for(cls, data: Any) -> Any:
        """`actors=auto` says it shorter: how many there are is decided when the cluster has been seen."""
        if not isinstance(data, dict) or data.get("actors") != "auto":
            return data
        if data.get("placement") != "ray":
            raise ValueError("actors=auto needs placement=ray: elsewhere a number is needed")
        if data.get("gradients", "solo") != "solo":
            raise ValueError(f"actors=auto with gradients={data['gradients']}: every cell plays for itself, with as "
                             "many actors as you say; give a number")
        return data | {"actors": 1, "ray": dict(data.get("ray") or {}) | {"elastic": True}}

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        if found := contradictions(self):
            raise ValueError("\n".join(found))
        return self


def contradictions(cfg: RunConfig) -> list[str]:
    """Values that are fine one by one and not together: one line each, with both values and the remedy."""
    window = Window(future=getattr(cfg.agent, "n_step", 1))
    found = cfg.replay.problems(cfg.learner.batch_size, window, cfg.lanes)
    if cfg.replay.min_steps < cfg.learner.batch_size:
        found.append(f"replay.min_steps={cfg.replay.min_steps} is below learner.batch_size={cfg.learner.batch_size}: "
                     "raise min_steps, so that the first batch finds enough to draw from")
    if cfg.total_steps <= cfg.replay.min_steps:
        found.append(f"total_steps={cfg.total_steps} ends before learning begins, replay.min_steps="
                     f"{cfg.replay.min_steps}: raise total_steps or lower min_steps")
    if cfg.total_steps <= cfg.cells * cfg.lanes * cfg.replay.chunk_steps:
        found.append(f"total_steps={cfg.total_steps} ends before learning begins: the first chunks are full after "
                     f"env.lanes={cfg.env.lanes} x actors={cfg.actors}{_cells(cfg)} x replay.chunk_steps="
                     f"{cfg.replay.chunk_steps} steps; raise total_steps or lower chunk_steps")
    arms, drawn = getattr(cfg.agent, "arms", None), getattr(cfg.explore, "arms", None)
    if arms is not None and drawn is not None and arms != drawn:
        found.append(f"explore.arms={drawn} are not the agent.arms={arms} that there are: set both alike")
    schedules: dict[str, EvalConfig | CheckpointConfig] = {"eval": cfg.eval, "checkpoint": cfg.checkpoint}
    for name, section in schedules.items():
        if section.period_steps and section.period_updates:
            found.append(f"{name}.period_steps={section.period_steps} and {name}.period_updates="
                         f"{section.period_updates} are both set: choose one clock, set the other to null")
    if cfg.stop_at is not None and not (cfg.eval.period_steps or cfg.eval.period_updates):
        found.append(f"stop_at={cfg.stop_at:g} is judged by evaluations, and there are none: "
                     "set eval.period_steps, or stop_at=null")
    if cfg.eval.from_return is not None and (cfg.placement != "inline" or cfg.gradients != "solo"):
        found.append(f"eval.from_return={cfg.eval.from_return:g} needs an evaluator beside the actors: leave it out, "
                     "or set placement=inline gradients=solo")
    found += _two_explorations(cfg)
    found += _noise_on_discrete_actions(cfg)
    found += _placement(cfg)
    recorded = cfg.learner.capture is True and not cfg.learner.compile
    if cfg.gradients == "allreduce" and cfg.allreduce.overlap and recorded:
        found.append("allreduce.overlap=true with learner.capture=true: a recording hands over all gradients at once; "
                     "set learner.capture=false")
    if cfg.gradients == "server":
        found += _server(cfg)
    return found + (_exact_resume(cfg) if cfg.run.exact_resume else [])


def _placement(cfg: RunConfig) -> list[str]:
    found = cfg.fleet.problems() if cfg.placement == "processes" else []
    if cfg.placement == "ray" and cfg.device.startswith("cuda:") and cfg.device != "cuda:0":
        found.append(f"device={cfg.device} with placement=ray: Ray chooses the GPU and shows the learner no other; set "
                     "device=cuda")
    if cfg.placement == "processes" and cfg.gradients != "solo":
        each = "rank" if cfg.gradients == "allreduce" else "cell"
        found.append(f"gradients={cfg.gradients} with placement={cfg.placement}: every {each} plays for itself; "
                     "set placement=inline, or ray")
    return found


def _server(cfg: RunConfig) -> list[str]:
    found = []
    if cfg.total_steps <= cfg.cells * cfg.replay.min_steps:
        found.append(f"total_steps={cfg.total_steps} ends before learning begins: each of cells={cfg.cells} takes "
                     f"replay.min_steps={cfg.replay.min_steps} steps first; raise total_steps or lower min_steps")
    stale, pull, push = cfg.server.max_staleness, cfg.server.pull_period_updates, cfg.server.push_period_updates
    own = -(-pull // push) - 1
    if stale is not None and stale < own:
        found.append(f"server.max_staleness={stale} with server.pull_period_updates={pull}: before a cell pulls again "
                     f"its weights are {own} of its own pushes old, and what it pushes is dropped; raise max_staleness "
                     "or lower the period")
    return found


def _two_explorations(cfg: RunConfig) -> list[str]:
    """Noisy layers explore by themselves: ε beside them must be wanted, and cannot be wanted where there is none.
    Without noise, something else has to explore."""
    noisy, key = getattr(cfg.agent, "noisy", None), EPSILONS.get(cfg.explore.kind)
    if noisy is None or (not noisy and key is None):
        return []
    explorer = plugin_module("qfleet.explore", cfg.explore.kind).build(cfg.explore, 1, 0, 1)
    random = any(float(explorer.arms(steps).epsilon.max()) > 0 for steps in (0, cfg.total_steps))
    if not noisy:
        return [] if random else [
            f"explore.kind={cfg.explore.kind} takes no random actions, and agent.noisy=false adds no noise: nothing "
            f"new would ever be tried; raise explore.{key}, or set agent.noisy=true"]
    if random and not cfg.agent.noisy_epsilon:
        return [f"agent.noisy=true explores by its noise, and explore.kind={cfg.explore.kind} adds random actions: set "
                "explore.kind=constant explore.epsilon=0, or agent.noisy_epsilon=true to have both"]
    if cfg.agent.noisy_epsilon and not random:
        return [f"agent.noisy_epsilon=true has no effect: explore.kind={cfg.explore.kind} takes no random actions; "
                "leave it out"]
    return []


def _noise_on_discrete_actions(cfg: RunConfig) -> list[str]:
    """What is added to continuous actions is lost on an agent whose actions are numbered."""
    if getattr(cfg.agent, "continuous", False) or cfg.explore.kind not in ("gaussian", "ou"):
        return []
    return [f"explore.kind={cfg.explore.kind} adds noise to continuous actions, and those of agent.algo="
            f"{cfg.agent.algo} are numbered: set agent.algo=ddpg, or explore.kind=linear if the environment's are "
            "numbered, too"]


def action_mismatch(agent: Config, spec: EnvSpec) -> str | None:
    """Why an agent cannot act in an environment, if its actions are of the other kind."""
    algo, continuous = agent.algo, getattr(agent, "continuous", False)  # type: ignore[attr-defined]
    if spec.box is not None and not continuous:
        return (f"{spec.id} has continuous actions ({spec.action_text}), and agent.algo={algo} chooses among numbered ones: "
                f"use agent.algo=ddpg or d4pg with explore.kind=gaussian, or train the id itself: `qfleet train "
                f"{spec.id}`")
    if spec.box is None and continuous:
        return (f"{spec.id} has {spec.action_text}, and agent.algo={algo} is for continuous ones (Box): use agent.algo=dqn "
                f"with explore.kind=linear, or train the id itself: `qfleet train {spec.id}`")
    return None


def _exact_resume(cfg: RunConfig) -> list[str]:
    """What keeps resuming from being bitwise equal to no interruption, or would spoil the episodes."""
    found = []
    if cfg.placement != "inline":
        found.append(f"run.exact_resume=true with placement={cfg.placement}: processes do not wait for each other; set "
                     "placement=inline")
    if cfg.gradients != "solo":
        found.append(f"run.exact_resume=true with gradients={cfg.gradients}: learners do not wait for "
                     "each other, or hold batches that are not saved; set gradients=solo")
    if cfg.device.startswith("cuda"):
        found.append(f"run.exact_resume=true with device={cfg.device}: only the CPU is exact; set device=cpu")
    if cfg.eval.beside:
        found.append("run.exact_resume=true with eval.beside=true: when its scores come is a matter of chance, and "
                     "with them the end of the run; set eval.beside=false")
    if not cfg.checkpoint.replay:
        found.append("run.exact_resume=true with checkpoint.replay=false: the replay must be saved, too; "
                     "set checkpoint.replay=true")
    steps = cfg.checkpoint.period_steps
    if updates := cfg.checkpoint.period_updates:
        steps = int(updates * cfg.learner.batch_size / cfg.replay.samples_per_insert)
    if not steps:
        return [*found, "run.exact_resume=true needs scheduled checkpoints: set checkpoint.period_steps"]
    least = 2 * cfg.env.max_episode_steps if cfg.env.max_episode_steps else EXACT_STEPS_PER_LANE
    if steps < least * cfg.lanes:
        found.append(f"run.exact_resume=true cuts every episode at a checkpoint, here after {steps // cfg.lanes} "
                     f"steps per lane, which is short against the episodes: set checkpoint.period_steps to at least "
                     f"{least * cfg.lanes} ({least} for each lane, env.lanes={cfg.env.lanes} x actors={cfg.actors})")
    return found


def _cells(cfg: RunConfig) -> str:
    return f" x cells={cfg.cells}" if cfg.cells > 1 else ""


def per_rank(cfg: RunConfig, ranks: int) -> RunConfig:
    """The same run, stated for one of `ranks` ranks: batch, learning rate, updates and replay as each of them has it.

    Total steps, and all periods, stay those of the whole run. What has been shared out among other numbers of ranks
    is shared out anew, and what fits already comes back as it is.
    """
    rule, learner, replay = cfg.allreduce, cfg.learner, cfg.replay
    before = rule.scaled_for or 1
    updates = cfg.total_updates
    if rule.batch == "global":
        whole = learner.batch_size * before
        if whole % ranks:
            raise UserError(f"learner.batch_size={whole} cannot be divided among {ranks} ranks: choose a multiple of "
                            f"{ranks}, or allreduce.batch=per_rank")
        learner = learner.model_copy(update={"batch_size": whole // ranks})
    elif ranks != before:
        growth = ranks / before
        power = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}[rule.rate_scaling]
        learner = learner.model_copy(update={"learning_rate": learner.learning_rate * growth**power})
        updates = None if updates is None else math.ceil(updates / growth)
    least = max(math.ceil(replay.min_steps * before / ranks), learner.batch_size)
    replay = replay.model_copy(update={"capacity": math.ceil(replay.capacity * before / ranks), "min_steps": least})
    return cfg.model_copy(update={
        "cells": ranks, "learner": learner, "replay": replay if ranks != before else cfg.replay,
        "total_updates": updates, "allreduce": rule.model_copy(update={"scaled_for": ranks})})
