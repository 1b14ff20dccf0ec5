"""From a config to living parts: devices and threads are settled, environments and agents built, roles cast."""

from __future__ import annotations

import logging
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path

import torch

from qfleet import envs
from qfleet.agent import Agent
from qfleet.budget import require_memory, describe_disk, free_bytes, network_bytes, replay_memory
from qfleet.config import flatten, plugin_module
from qfleet.envs import EnvConfig
from qfleet.envs.later import LazyEnv
from qfleet.explore import AdaptiveExplorer, Explorer
from qfleet.replay import planner
from qfleet.replay.layout import Layout
from qfleet.roles.footprint import footprint
from qfleet.roles.seeds import seed_for
from qfleet.runs.video import require_encoder
from qfleet.runtime.inline import ActingSetup, ActorSpec
from qfleet.runtime.isolate import make_isolated_env
from qfleet.runtime.plan import TrainingPlan
from qfleet.runtime.precision import bf16_is_faster
from qfleet.runtime.threads import MAX_THREADS_PER_CORE, decoding_threads, thread_plan, usable_cores
from qfleet.runtime.watchdog import WatchdogEnv
from qfleet.settings import RunConfig, per_rank, action_mismatch
from qfleet.types import EnvSpec, UserError, VectorEnv

log = logging.getLogger(__name__)


def make_env(cfg: EnvConfig, lanes: int, *, render: bool = False, stall_timeout_s: float | None = None) -> VectorEnv:
    """The environment, in a process of its own if asked for, watched if it may not hang for ever."""
    if cfg.isolate:
        return make_isolated_env(cfg.model_dump(mode="json"), lanes, cfg.step_timeout_s, cfg.max_faults, render)
    env = envs.make(cfg.model_copy(update={"threads": cfg.threads or usable_cores()}), lanes, render=render)
    return env if stall_timeout_s is None else WatchdogEnv(env, stall_timeout_s)


def make_agent(config: RunConfig, spec: EnvSpec) -> Agent:
    if problem := action_mismatch(config.agent, spec):
        raise UserError(problem)
    agent: Agent = plugin_module("qfleet.algos", config.agent.algo).build(config.agent, spec)
    return agent


UNLIMITED_STEPS = 10_000
"""Of an episode that is evaluated or shown, at most, in an environment without a time limit: it must end some time."""

AUTO_VALUES = {"device": "auto", "learner.precision": "auto", "learner.capture": "auto", "replay.store": "auto",
               "replay.max_bytes": None, "run.threads": None}
"""Keys that `settle` decides where they have these values."""


def _auto_keys(config: RunConfig) -> list[str]:
    values = flatten(config)
    return [key for key, word in AUTO_VALUES.items() if values[key] == word]


def reopen_auto(old: RunConfig, new: RunConfig, named: Collection[str]) -> RunConfig:
    """A config to go on with. On another kind of device, what had been left open is open again; on the same one, what
    was decided stays, as do for ever the keys that the user has `named`. Devices of other hosts are not looked at."""
    mine = {key for key in AUTO_VALUES if key in old.run.settled and not any(f"{key}.".startswith(f"{name}.")
                                                                             for name in named)}
    new = new.model_copy(update={"run": new.run.model_copy(update={"settled": tuple(sorted(mine))})})
    elsewhere = new.placement == "ray" and new.ray.cell_anywhere
    wish = "auto" if "device" in mine and not (old.run.exact_resume or elsewhere) else new.device
    if wish == "auto" and not elsewhere:
        wish = str(resolve_device(wish))
    if "auto" in (wish, old.device) or torch.device(wish).type == torch.device(old.device).type:
        return new
    for section, _, name in (key.rpartition(".") for key in sorted(mine)):
        change = {name: AUTO_VALUES[f"{section}.{name}" if section else name]}
        new = new.model_copy(update={section: getattr(new, section).model_copy(update=change)} if section else change)
    return new


def resolve_auto(config: RunConfig, spec: EnvSpec) -> RunConfig:
    """The same config with nothing left open: device, precision, threads and memory limit are decided and written."""
    if config.eval.video_period:
        require_encoder()
    images = any(leaf.kind == "image" for leaf in spec.observation.values())
    device = resolve_device("cpu" if config.run.exact_resume and config.device == "auto" else config.device,
                     elsewhere=config.placement == "ray" and config.ray.cell_anywhere)
    if config.gradients == "allreduce":
        config = per_rank(config, config.cells)
    precision = config.learner.precision
    if precision == "auto":
        precision = "bf16" if images and _fast_bf16(device) else "fp32"
    decided = tuple(sorted({*config.run.settled, *_auto_keys(config)}))
    settled = config.model_copy(update={
        "device": str(device),
        "learner": config.learner.model_copy(update={"precision": precision}),
        "run": config.run.model_copy(update={
            "threads": _threads(config, images and device.type == "cpu"), "settled": decided}),
    })
    network = require_memory(settled, footprint(make_agent(settled, spec)))
    layout = make_layout(settled, spec)
    if problems := settled.replay.problems(settled.learner.batch_size, layout.window, settled.lanes):
        raise UserError("\n".join(problems))
    store = _store(settled, layout)
    settled = settled.model_copy(update={
        "replay": settled.replay.model_copy(update={"store": store}),
        "learner": settled.learner.model_copy(update={"capture": _capture(settled, device)})})
    memory = replay_memory(settled, layout, network)
    if memory.max_bytes is None or memory.max_bytes > _most_bytes(memory, layout, settled.replay.capacity):
        return settled  # a limit that is never met would only keep the run from going on where less memory is free
    replay = settled.replay.model_copy(update={"max_bytes": memory.max_bytes})
    return settled.model_copy(update={"replay": replay})


def _capture(config: RunConfig, device: torch.device) -> bool:
    """Whether updates are recorded as CUDA graphs."""
    wish = config.learner.capture
    if device.type != "cuda":
        if wish is True:
            log.warning("learner.capture=true has no effect on a CPU: only CUDA graphs are recorded")
        return False
    return not (config.gradients == "allreduce" and config.allreduce.overlap) if wish == "auto" else wish


def _threads(config: RunConfig, convolutions: bool) -> int:
    """Those that the user names, or else as many as are planned."""
    wish, cores = config.run.threads, usable_cores()
    if wish and wish > MAX_THREADS_PER_CORE * cores and config.placement != "ray" and (
            "run.threads" not in config.run.settled):
        raise UserError(f"run.threads={wish}: this process may use {cores} core{'s' * (cores > 1)}, and threads that "
                        f"share a core wait for each other; set run.threads={cores} or less, or leave it out")
    return wish or thread_plan(convolutions, learner_cores(config)).torch


def learner_cores(config: RunConfig) -> int:
    """Of this host, for one cell: those of actors in processes of their own are taken."""
    beside = config.actors if config.placement == "processes" and config.fleet.local_actors else 0
    cores = (usable_cores() - beside) // config.cells if config.placement != "ray" else int(config.ray.cell_cpus)
    return max(1, cores)


def _store(config: RunConfig, layout: Layout) -> str:
    """On a GPU that has room for it the replay lies there, unless a limit in bytes asks for the compressed one."""
    if config.replay.store != "auto":
        return config.replay.store
    if not config.device.startswith("cuda") or config.replay.max_bytes is not None:
        return "host"
    free, needed = free_bytes(config), sum(planner.device_bytes(layout, config.replay))
    if free is not None and needed < free // 2:
        return "device"
    why = "what is free there is not known here" if free is None else (
        f"{planner.format_bytes(needed)} are more than half of the {planner.format_bytes(free)} that are free there"
        + (f" for each of {config.cells} cells" if config.cells > 1 else ""))
    log.warning("replay.store: the replay is kept compressed in main memory, not on %s, since %s; replay.store=device, "
                "or a smaller replay.capacity, would keep it there", config.device, why)
    return "host"


def _most_bytes(memory: planner.MemoryPlan, layout: Layout, capacity: int) -> float:
    """What a replay takes if nothing in it can be compressed and, where chunks end with episodes, all have one step."""
    fixed = sum(planner.fixed_bytes(layout, capacity)) if layout.window.within_episode else memory.fixed
    return fixed + 1.05 * planner.IMAGE_RATIO * memory.blob_bytes_estimate


def make_layout(config: RunConfig, spec: EnvSpec) -> Layout:
    agent = make_agent(config, spec)
    return Layout(spec, agent.window, config.replay.chunk_steps, agent.columns, agent.stored_states, agent.state_rows)


def make_plan(config: RunConfig) -> TrainingPlan:
    """What the roles need to know of a settled config."""
    alone = config.placement != "inline" and config.gradients == "solo"  # elsewhere every cell plays for itself
    decoders = decoding_threads(config.run.threads or 1, config.device.startswith("cuda"), alone, learner_cores(config))
    return TrainingPlan(seed=config.seed, device=torch.device(config.device), total_steps=config.total_steps,
                        total_updates=config.total_updates, stop_at=config.stop_at, exact_resume=config.run.exact_resume,
                        log_period_steps=config.run.log_period_steps,
                        log_period_updates=config.run.log_period_updates, replay=config.replay, learner=config.learner,
                        eval=config.eval, checkpoint=config.checkpoint, slack_samples=_slack(config), decode_threads=decoders)


def _slack(config: RunConfig) -> float:
    return max(config.waiting_steps(config.lanes) * config.replay.samples_per_insert, 2.0 * config.learner.batch_size)


def make_explorer(config: RunConfig, index: int) -> Explorer:
    """How actor `index` explores: its lanes are a slice of all lanes of the run."""
    lanes = config.env.lanes
    build = plugin_module("qfleet.explore", config.explore.kind).build
    explorer: Explorer = build(config.explore, lanes, index * lanes, config.cells * config.lanes)
    if isinstance(explorer, AdaptiveExplorer):
        explorer.seed(seed_for(config.seed, "explorer", index))
    return explorer


def make_eval_env(config: RunConfig) -> VectorEnv:
    """The environment that the agent is evaluated in."""
    lanes = min(config.eval.lanes, config.eval.episodes)
    return make_env(eval_env_config(config), lanes, stall_timeout_s=config.run.stall_timeout_s)


def eval_env_config(config: RunConfig) -> EnvConfig:
    """The environment's section as evaluations have it: their limit of an episode counts where it is the lower one."""
    limits = [limit for limit in (config.env.max_episode_steps, config.eval.max_episode_steps) if limit]
    return with_step_limit(config.env.model_copy(update={"max_episode_steps": min(limits, default=None)}))


def with_step_limit(env: EnvConfig) -> EnvConfig:
    """The same for episodes that are waited for: where the environment has no time limit, it gets one."""
    return env.model_copy(update={"unlimited_episode_steps": env.unlimited_episode_steps or UNLIMITED_STEPS})


def make_acting_setup(config: RunConfig, env: VectorEnv, cell: int = 0, judged: bool = True) -> ActingSetup:
    """Who plays in a cell that is one process; the first actor gets this environment. `Cast.close` closes them all.

    Evaluations are for the first cell, if they are made in a cell at all: others have nothing to play them in.
    """
    with ExitStack() as stack:
        stack.callback(env.close)
        agent = make_agent(config, env.spec)
        envs = [env]
        for _ in range(1, config.actors):
            envs.append(make_env(config.env, config.env.lanes, stall_timeout_s=config.run.stall_timeout_s))
            stack.callback(envs[-1].close)
        seats = [ActorSpec(each, make_explorer(config, cell * config.actors + i)) for i, each in enumerate(envs)]
        judge = LazyEnv(lambda: make_eval_env(config), env.spec, min(config.eval.lanes, config.eval.episodes))
        cast = ActingSetup(agent, seats, judge if judged and cell == 0 else env)
        stack.pop_all()
    return cast


def describe_plan(config: RunConfig, spec: EnvSpec, where: Path | None = None) -> list[tuple[str, str]]:
    """What a settled run will do and take, before its first step: (name, text) pairs. Warns of a disk that is too small
    for the checkpoints of a run at that place."""
    layout, network, cells = make_layout(config, spec), footprint(make_agent(config, spec)), config.cells
    memory, total = replay_memory(config, layout, network), config.total_steps
    updates = max(0, total / cells - config.replay.min_steps) * (
        config.replay.samples_per_insert / config.learner.batch_size) * (cells if config.gradients == "server" else 1)
    return [
        ("environment", f"{spec.id}, {_lanes(config)}, {spec.action_text}, observes {spec.observation_text}"),
        ("agent", f"{config.agent.algo} on {config.device}, {config.learner.precision}, threads {config.run.threads}"),
        ("steps", f"{total:,} steps = {total * spec.frames_per_step:,} frames, about {updates:,.0f} updates"),
        ("memory", f"about {planner.format_bytes(memory.total)} for replay of {config.replay.capacity:,} steps"
                   + (f" on {config.device}" if config.replay.store == "device" else "")
                   + (" in each cell" if cells > 1 else "")
                   + f", {planner.format_bytes(max(network_bytes(config, network)))} for {network.elements:,} parameters"
                   + (f", {planner.format_bytes(memory.available)} left" if memory.available else "")),
        ("disk", describe_disk(config, layout, network, where or Path(config.run.root))),
        *_ranks(config),
        *_servers(config),
    ]


def _ranks(config: RunConfig) -> list[tuple[str, str]]:
    if config.gradients != "allreduce":
        return []
    learner, cells = config.learner, config.cells
    return [("ranks", f"{cells} with a batch of {learner.batch_size} each, {cells * learner.batch_size} together, "
                      f"learning rate {learner.learning_rate:g}"
                      + (", optimizer sharded" if config.allreduce.shard_optimizer else ""))]


def _servers(config: RunConfig) -> list[tuple[str, str]]:
    if config.gradients != "server":
        return []
    rule, cells = config.server, config.cells
    stale = rule.max_staleness
    guards = [f"gradients older than {stale} updates are dropped" if stale is not None else "",
              f"losses beyond {rule.outlier_deviations:g} deviations are left out" if rule.outlier_deviations else "",
              f"{rule.compensation} delay compensation" if rule.compensation != "none" else ""]
    return [("server", "; ".join([f"{rule.shards} shard{'s' * (rule.shards > 1)}, {cells} cell{'s' * (cells > 1)}",
                                  *filter(None, guards)]))]


def _lanes(config: RunConfig) -> str:
    each = f"{config.env.lanes} lanes"
    return each if config.actors == 1 else f"{config.actors} actors of {each}"


def resolve_device(name: str, elsewhere: bool = False) -> torch.device:
    """The device of that name; one of another host is believed."""
    if elsewhere and name != "auto":
        return torch.device(name)
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device={name}: torch {torch.__version__} sees no GPU here; use device=cpu or device=auto")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device={name}: there are {torch.cuda.device_count()} GPUs, counted from 0")
    return device


def acting_precision(config: RunConfig) -> str:
    """What an actor computes with, which acts on the CPU whatever the learner learns on."""
    fast = config.learner.precision == "bf16" and _fast_bf16(torch.device("cpu"))
    return "bf16" if fast else "fp32"


def _fast_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return bf16_is_faster()
