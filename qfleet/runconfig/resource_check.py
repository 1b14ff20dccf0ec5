"""Memory and disk requirements of a run, compared with the free space before it starts."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from qfleet.accel import gpu_memory
from qfleet.core import units
from qfleet.core.errors import UserError
from qfleet.learner.footprint import Footprint
from qfleet.replay import memory_plan
from qfleet.replay.layout import Layout
from qfleet.runconfig.run_config import RunConfig
from qfleet.runs.disk_space import free_checkpoint_bytes

log = logging.getLogger(__name__)


def network_bytes(config: RunConfig, network: Footprint) -> tuple[int, int]:
    """Memory of one learner's networks: on its device, if that is a GPU, and in main memory."""
    acting = network.acting_bytes(config.lanes // config.env.lanes + 1)
    if not config.device.startswith("cuda"):
        return 0, network.learning_bytes + acting
    # Acting learners use their device, actor processes the CPU.
    return network.learning_bytes + acting * config.learners_act, acting * (not config.learners_act)


def require_memory(config: RunConfig, network: Footprint) -> Footprint:
    """Return the network; raises UserError if training it needs more than the free memory."""
    for where, needed, free in zip((f"on {config.device}", "in main memory"), network_bytes(config, network),
                                   (free_bytes(config), free_memory(config)), strict=True):
        if free is not None and needed > free:
            raise UserError(
                f"the network has {network.elements:,} parameters: with gradients, optimizer, a target "
                f"and acting copies it takes about {units.format_bytes(needed)} {where}, and "
                f"{units.format_bytes(free)} are free: make it smaller (agent.hidden, agent.torso), or free "
                "memory"
            )
    return network


def replay_memory(config: RunConfig, layout: Layout, network: Footprint) -> memory_plan.MemoryPlan:
    """Memory of one learner's replay, within what its networks leave free."""
    on_device, in_main_memory = network_bytes(config, network)
    device = config.replay.store == "device"
    free = free_bytes(config) if device else free_memory(config)
    networks = on_device if device and config.device.startswith("cuda") else in_main_memory
    left = None if free is None else max(0, free - networks)
    return (
        memory_plan.plan_device_memory(layout, config.replay, left)
        if device
        else memory_plan.plan_memory(layout, config.replay, left)
    )


def free_memory(config: RunConfig) -> int | None:
    """Free main memory per learner, as all learners may be on this host; None if it is not known."""
    free = memory_plan.available_memory()
    return None if free is None else free // config.learners


def free_bytes(config: RunConfig) -> int | None:
    """Free memory of the learner's device per learner, as all may share it; None if it cannot be queried."""
    device = torch.device(config.device)
    if device.type != "cuda":
        return free_memory(config)
    free = gpu_memory.free_bytes(device)
    return None if free is None else free // config.learners


def describe_disk(config: RunConfig, layout: Layout, network: Footprint, where: Path) -> str:
    """Peak disk usage of checkpoints, as text: a new checkpoint is complete before an old one is deleted."""
    rule, learners, steps = config.checkpoint, config.learners, config.total_steps
    period = rule.period_steps or (rule.period_updates or 0) * config.learner.batch_size / (
        config.replay.samples_per_insert) or steps
    older = int(min(rule.keep, max(0, steps // period - 1)))  # besides the newest; most of the replay is shared
    replay = [learners * memory_plan.saved_bytes(layout, config.replay, each / learners) * rule.replay
              for each in (steps, *[period] * older)]
    needed = (1 + older) * network.checkpoint_bytes + 2 * network.copy_bytes + sum(replay)
    free = free_checkpoint_bytes(where)
    if free is not None and needed > free:
        log.warning("the disk of %s is too small for this run: checkpoints take up to about %s at the same time, and "
                    "%s are free; lower checkpoint.keep or replay.capacity, set checkpoint.replay=false, or choose "
                    "another disk with run.root", where, units.format_bytes(needed), units.format_bytes(free))
    return (f"up to about {units.format_bytes(needed)} for checkpoints {'with' if rule.replay else 'without'} replay, "
            f"{rule.keep} of which {'are' if rule.keep > 1 else 'is'} kept"
            + (f", {units.format_bytes(free)} free" if free is not None else ""))
