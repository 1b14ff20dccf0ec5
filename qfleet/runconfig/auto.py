"""Resolves settings left at `auto` for this machine: device, precision, threads, store, memory limit."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch

from qfleet.accel.choose import resolve_capture
from qfleet.accel.precision import bf16_is_fast_on
from qfleet.accel.threads import MAX_THREADS_PER_CORE, thread_plan, usable_cores
from qfleet.config import flatten
from qfleet.core.env import EnvSpec
from qfleet.core.errors import UserError
from qfleet.core.extras import require_encoder
from qfleet.core.units import format_bytes
from qfleet.envs import EnvConfig
from qfleet.learner.footprint import footprint
from qfleet.optim.torch_optimizer import check_optimizer
from qfleet.replay import memory_plan
from qfleet.replay.layout import Layout
from qfleet.runconfig.build import cores_per_learner, expected_updates, make_agent, make_layout
from qfleet.runconfig.per_rank import per_rank
from qfleet.runconfig.resource_check import free_bytes, replay_memory, require_memory
from qfleet.runconfig.run_config import RunConfig
from qfleet.runs.names import settled_name

log = logging.getLogger(__name__)


AUTO_VALUES = {"device": "auto", "learner.precision": "auto", "learner.capture": "auto", "replay.store": "auto",
               "replay.max_bytes": None, "run.threads": None}
"""Keys that `resolve_auto` sets if they have these values."""


def _auto_keys(config: RunConfig) -> list[str]:
    values = flatten(config)
    return [key for key, word in AUTO_VALUES.items() if values[key] == word]


def reopen_auto(old: RunConfig, new: RunConfig, named: Collection[str]) -> RunConfig:
    """Config of a resumed run, with automatic settings reset if the kind of device has changed.

    On the same kind of device the resolved values stay, as do always the keys that the user has `named`. Devices of
    other hosts are not queried.
    """
    auto_keys = {key for key in AUTO_VALUES if key in old.run.settled and not any(f"{key}.".startswith(f"{name}.")
                                                                             for name in named)}
    new = new.model_copy(update={"run": new.run.model_copy(update={"settled": tuple(sorted(auto_keys))})})
    elsewhere = new.launcher_traits.learner_elsewhere
    device = "auto" if "device" in auto_keys and not (old.run.exact_resume or elsewhere) else new.device
    if device == "auto" and not elsewhere:
        device = str(resolve_device(device))
    if "auto" in (device, old.device) or torch.device(device).type == torch.device(old.device).type:
        return new
    for section, _, name in (key.rpartition(".") for key in sorted(auto_keys)):
        change = {name: AUTO_VALUES[f"{section}.{name}" if section else name]}
        new = new.model_copy(update={section: getattr(new, section).model_copy(update=change)} if section else change)
    return new


def resolve_auto(config: RunConfig, spec: EnvSpec, learners_here: int | None = None) -> RunConfig:
    """The config with all automatic settings resolved: device, precision, threads, store and memory limit.

    `learners_here` of the learners are on this host, all of them by default.
    """
    if config.eval.video_period:
        require_encoder()
    if config.init_from is not None:
        config = config.model_copy(update={"init_from": settled_name(config.init_from, config.run.root)})
    config = config.model_copy(update={"env": with_image_symbols(config.env, spec)})
    images = any(leaf.kind == "image" for leaf in spec.observation.values())
    device = resolve_device("cpu" if config.run.exact_resume and config.device == "auto" else config.device,
                     elsewhere=config.launcher_traits.learner_elsewhere)
    if config.synchronous:
        config = per_rank(config, config.learners)
    config = _with_schedule(config)
    precision = config.learner.precision
    if precision == "auto":
        precision = "bf16" if images and bf16_is_fast_on(device) else "fp32"
    auto_keys = tuple(sorted({*config.run.settled, *_auto_keys(config)}))
    resolved = config.model_copy(update={
        "device": str(device),
        "learner": config.learner.model_copy(update={"precision": precision}),
        "run": config.run.model_copy(update={
            "threads": _threads(config, images and device.type == "cpu", learners_here), "settled": auto_keys}),
    })
    network = require_memory(resolved, footprint(make_agent(resolved, spec)))
    layout = make_layout(resolved, spec)
    if problems := resolved.replay.problems(resolved.learner.batch_size, layout.window, resolved.lanes):
        raise UserError("\n".join(problems))
    store = _store(resolved, layout)
    resolved = resolved.model_copy(update={
        "replay": resolved.replay.model_copy(update={"store": store}),
        "learner": resolved.learner.model_copy(update={"capture": _capture(resolved, device)})})
    memory = replay_memory(resolved, layout, network)
    if memory.max_bytes is None or memory.max_bytes > _most_bytes(memory, layout, resolved.replay.capacity):
        return resolved  # a limit that is never reached would only prevent resuming with less free memory
    replay = resolved.replay.model_copy(update={"max_bytes": memory.max_bytes})
    return resolved.model_copy(update={"replay": replay})


def with_image_symbols(env: EnvConfig, spec: EnvSpec) -> EnvConfig:
    """The env section with the images of symbols that were found, so that all processes and later runs agree."""
    if env.image_symbols != "auto":
        return env
    return env.model_copy(update={"image_symbols": symbols_of(spec) or None})


def symbols_of(spec: EnvSpec) -> dict[str, int]:
    """Number of symbols of each image of symbols."""
    return {name: leaf.symbols for name, leaf in spec.observation.items() if leaf.symbols}


def _with_schedule(config: RunConfig) -> RunConfig:
    """The config with the updates over which the learning rate changes; UserError for an unusable optimizer."""
    learner = config.learner
    if learner.schedule != "constant" and learner.schedule_updates is None:
        learner = learner.model_copy(update={"schedule_updates": max(1, round(expected_updates(config)))})
    end = learner.schedule_updates
    if end is not None and learner.warmup_updates >= end:
        raise UserError(f"learner.warmup_updates={learner.warmup_updates} leaves nothing of the {end} updates of "
                        f"learner.schedule={learner.schedule}: lower it, or set learner.schedule_updates")
    check_optimizer(learner, config.has_server or (config.synchronous and config.allreduce.shard_optimizer))
    return config.model_copy(update={"learner": learner})


def _capture(config: RunConfig, device: torch.device) -> bool:
    """True if updates are captured as CUDA graphs."""
    return resolve_capture(config.learner.capture, device, config.synchronous and config.allreduce.overlap)


def _threads(config: RunConfig, convolutions: bool, learners_here: int | None) -> int:
    """Number of threads set by the user, or else the planned number."""
    requested, cores = config.run.threads, usable_cores()
    of_this_host = config.launcher_traits.learner_cores is None
    if requested and requested > MAX_THREADS_PER_CORE * cores and of_this_host and (
            "run.threads" not in config.run.settled):
        raise UserError(f"run.threads={requested}: this process may use {cores} core{'s' * (cores > 1)}, and threads "
                        f"that share a core slow each other down; set run.threads={cores} or less, or leave it out")
    return requested or thread_plan(convolutions, cores_per_learner(config, learners_here)).torch


def _store(config: RunConfig, layout: Layout) -> str:
    """Place of the replay: on a GPU with enough free memory, unless a limit in bytes requires the compressed store."""
    if config.replay.store != "auto":
        return config.replay.store
    if not config.device.startswith("cuda") or config.replay.max_bytes is not None:
        return "host"
    free, needed = free_bytes(config), sum(memory_plan.device_bytes(layout, config.replay))
    if free is not None and needed < free // 2:
        return "device"
    why = (
        "its free memory is not known here"
        if free is None
        else (
            f"{format_bytes(needed)} is more than half of the {format_bytes(free)} free there"
            + (f" for each of {config.learners} learners" if config.learners > 1 else "")
        )
    )
    log.warning("replay.store: the replay is kept compressed in main memory, not on %s, since %s; to keep it there "
                "set replay.store=device or lower replay.capacity", config.device, why)
    return "host"


def _most_bytes(memory: memory_plan.MemoryPlan, layout: Layout, capacity: int) -> float:
    """Upper bound of a replay's size: nothing is compressible and, if chunks end with episodes, each has one step."""
    fixed = sum(memory_plan.fixed_bytes(layout, capacity)) if layout.window.within_episode else memory.fixed
    return fixed + 1.05 * memory_plan.IMAGE_RATIO * memory.blob_bytes_estimate


def resolve_device(name: str, elsewhere: bool = False) -> torch.device:
    """Device by name; `elsewhere` accepts a name on another host without checking it."""
    if elsewhere and name != "auto":
        return torch.device(name)
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UserError(f"device={name}: torch {torch.__version__} finds no GPU; use device=cpu or device=auto")
        if (device.index or 0) >= torch.cuda.device_count():
            raise UserError(f"device={name}: there are {torch.cuda.device_count()} GPUs, counted from 0")
    return device


def acting_precision(config: RunConfig) -> str:
    """Precision of an actor, which acts on the CPU for any learner device."""
    fast = config.learner.precision == "bf16" and bf16_is_fast_on(torch.device("cpu"))
    return "bf16" if fast else "fp32"


def training_device(config: RunConfig) -> torch.device:
    """Return the device of the training, or the CPU if it is not available."""
    try:
        return resolve_device(config.device)
    except UserError:
        return torch.device("cpu")


@contextmanager
def run_threads(config: RunConfig) -> Iterator[None]:
    """Set torch's number of threads to that of the run, and restore it afterwards for the calling program."""
    before = torch.get_num_threads()
    torch.set_num_threads(config.run.threads or 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
