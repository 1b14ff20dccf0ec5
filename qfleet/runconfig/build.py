"""Builds environments, agents, explorers and the training plan from a config."""

from __future__ import annotations

import logging
from contextlib import ExitStack

import torch

from qfleet import envs
from qfleet.accel.threads import decoding_threads, usable_cores
from qfleet.algos.normalisation import normalised
from qfleet.config import load_attribute, plugin_module
from qfleet.core.agent import Agent
from qfleet.core.env import EnvSpec, VectorEnv
from qfleet.core.errors import UserError
from qfleet.core.exploration import AdaptiveExplorer, Explorer
from qfleet.core.seeds import seed_for
from qfleet.envs import EnvConfig, gym
from qfleet.envs.isolated import make_isolated_env
from qfleet.envs.lazy import LazyEnv
from qfleet.envs.vector import VectorEnvLanes
from qfleet.envs.watchdog import WatchdogEnv
from qfleet.replay.layout import Layout
from qfleet.runconfig.rules import action_mismatch
from qfleet.runconfig.run_config import RunConfig
from qfleet.training.callbacks import CheckedCallback, check_callbacks
from qfleet.training.local_actors import ActingSetup, ActorSpec
from qfleet.training.loop import TrainingPlan

log = logging.getLogger(__name__)


def make_env(cfg: EnvConfig, lanes: int, *, render: bool = False, stall_timeout_s: float | None = None) -> VectorEnv:
    """Build the environment, in a separate process if configured, with a watchdog if `stall_timeout_s` is given."""
    if cfg.isolate:
        return make_isolated_env(cfg.model_dump(mode="json"), lanes, cfg.step_timeout_s, cfg.max_faults, render)
    env = envs.make(cfg.model_copy(update={"threads": cfg.threads or usable_cores()}), lanes, render=render)
    return env if stall_timeout_s is None else WatchdogEnv(env, stall_timeout_s)


def make_agent(config: RunConfig, spec: EnvSpec) -> Agent:
    if problem := action_mismatch(config.agent, spec):
        raise UserError(problem)
    agent: Agent = plugin_module("qfleet.algos", config.agent.algo).build(config.agent, spec)
    return normalised(agent, config.normalise, spec, getattr(config.agent, "gamma", None))


UNLIMITED_STEPS = 10_000
"""Step limit of evaluated or rendered episodes in an environment without a time limit."""


def cores_per_learner(config: RunConfig, learners_here: int | None = None) -> int:
    """CPU cores of one learner: those that the launcher reserves for it, or its share of this host's.

    `learners_here` of the learners are on this host, all of them by default. Each local actor process has a core.
    """
    if (reserved := config.launcher_traits.learner_cores) is not None:
        return reserved
    actor_processes = config.actors if config.fleet.local_actors else 0
    return max(1, (usable_cores() - actor_processes) // (learners_here or config.learners))


def with_env_threads(config: RunConfig, learners_here: int | None = None) -> RunConfig:
    """Config of a learner that acts beside others: its emulators run on its share of the cores."""
    threads = config.env.threads or cores_per_learner(config, learners_here)
    return config.model_copy(update={"env": config.env.model_copy(update={"threads": threads})})


def make_layout(config: RunConfig, spec: EnvSpec) -> Layout:
    agent = make_agent(config, spec)
    return Layout(spec, agent.window, config.replay.chunk_steps, agent.columns, agent.stored_states, agent.state_rows)


def make_plan(config: RunConfig, learners_here: int | None = None) -> TrainingPlan:
    """Training plan of a config with resolved auto values, for a learner that shares its host with others."""
    decoders = decoding_threads(config.run.threads or 1, config.device.startswith("cuda"), not config.learners_act,
                                cores_per_learner(config, learners_here))
    return TrainingPlan(
        seed=config.seed, device=torch.device(config.device), total_steps=config.total_steps,
        total_updates=config.total_updates, stop_at=config.stop_at, exact_resume=config.run.exact_resume,
        log_period_steps=config.run.log_period_steps, log_period_updates=config.run.log_period_updates,
        replay=config.replay, learner=config.learner, eval=config.eval, checkpoint=config.checkpoint,
        slack_samples=_slack_samples(config), decode_threads=decoders)


def expected_updates(config: RunConfig) -> float:
    """Updates of the optimizer in `total_steps`, by the replay ratio; with a server, the pushes of all learners."""
    samples = max(0, config.total_steps / config.learners - config.replay.min_steps) * config.replay.samples_per_insert
    updates = samples / config.learner.batch_size
    if config.has_server:
        updates *= config.learners / config.parameter_server.push_period_updates
    return updates if config.total_updates is None else min(updates, config.total_updates)


def _slack_samples(config: RunConfig) -> float:
    return max(config.waiting_steps(config.lanes) * config.replay.samples_per_insert, 2.0 * config.learner.batch_size)


def make_callbacks(config: RunConfig) -> list[CheckedCallback]:
    """The callbacks that the config names, checked."""
    return check_callbacks([load_attribute(name) for name in config.callbacks])


def require_callbacks(config: RunConfig) -> None:
    """UserError if another process could not create or call the callbacks that the config names."""
    check_callbacks([load_attribute(name) for name in config.callbacks], create=False)


def make_explorer(config: RunConfig, index: int) -> Explorer:
    """Explorer of a group of lanes. Groups are numbered over the whole run: process index x env.groups + group."""
    lanes = config.env.lanes
    build = plugin_module("qfleet.explore", config.explore.kind).build
    explorer: Explorer = build(config.explore, lanes, index * lanes, config.total_lanes)
    if isinstance(explorer, AdaptiveExplorer):
        explorer.seed(seed_for(config.seed, "explorer", index))
    return explorer


def make_eval_env(config: RunConfig) -> VectorEnv:
    """Build the evaluation environment."""
    lanes = min(config.eval.lanes, config.eval.episodes)
    return make_env(eval_env_config(config), lanes, stall_timeout_s=config.run.stall_timeout_s)


def eval_env_config(config: RunConfig) -> EnvConfig:
    """The env section for evaluations; the lower of the training and evaluation step limits applies."""
    limits = [limit for limit in (config.env.max_episode_steps, config.eval.max_episode_steps) if limit]
    return with_step_limit(config.env.model_copy(update={"max_episode_steps": min(limits, default=None)}))


def with_step_limit(env: EnvConfig) -> EnvConfig:
    """The env section with a step limit for environments without one, for episodes that must end."""
    return env.model_copy(update={"unlimited_episode_steps": env.unlimited_episode_steps or UNLIMITED_STEPS})


def _require_eval_lanes(config: RunConfig, env: VectorEnv) -> None:
    """UserError if the user's vector environment cannot be evaluated: not only when the first evaluation is due."""
    lanes = env.env if isinstance(env, WatchdogEnv) else env
    if isinstance(lanes, VectorEnvLanes):
        needed = 1 if gym.takes_num_envs(config.env) else min(config.eval.lanes, config.eval.episodes)
        lanes.require_usable(eval_env_config(config), needed)


def make_acting_setup(config: RunConfig, env: VectorEnv, learner_index: int = 0, evaluates: bool = True) -> ActingSetup:
    """Agent, actors and evaluation environment of a learner that acts; there is one actor per group of lanes.

    The first one uses `env`.

    `ActingSetup.close` closes all of them. Only the first learner evaluates, and only if `evaluates`; the others get
    `env` as a placeholder for the evaluation environment.
    """
    with ExitStack() as stack:
        stack.callback(env.close)
        agent = make_agent(config, env.spec)
        envs = [env]
        for _ in range(1, config.env.groups):
            envs.append(make_env(config.env, config.env.lanes, stall_timeout_s=config.run.stall_timeout_s))
            stack.callback(envs[-1].close)
        if evaluates and learner_index == 0:
            _require_eval_lanes(config, env)
        first = learner_index * config.env.groups
        actors = [ActorSpec(each, make_explorer(config, first + i)) for i, each in enumerate(envs)]
        eval_env = LazyEnv(lambda: make_eval_env(config), env.spec, min(config.eval.lanes, config.eval.episodes))
        setup = ActingSetup(agent, actors, eval_env if evaluates and learner_index == 0 else env)
        stack.pop_all()
    return setup
