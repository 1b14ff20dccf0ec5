"""Memory plan of a replay, made before the run begins."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qfleet.core.env import OBS_PREFIX
from qfleet.core.errors import UserError
from qfleet.core.units import format_bytes
from qfleet.replay.config import ReplayConfig
from qfleet.replay.layout import Layout
from qfleet.replay.segments import CHUNKS_PER_SEGMENT

IMAGE_RATIO = 8.0
"""Assumed compression ratio of images. Ten Atari games reached 27-150 under random play; other images compress less."""

FREE_FRACTION = 0.8
"""Fraction of the free memory that a replay without a limit may take; networks and environments need the rest."""

BLOB_OVERHEAD = 64
"""Bytes of overhead of a Python bytes object: header, allocation and reference."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes allocated as arrays, expected bytes of compressed blocks, and the limit in effect."""

    dense_bytes: int
    blob_bytes_estimate: int
    tree_bytes: int
    available: int | None
    max_bytes: int | None

    @property
    def fixed(self) -> int:
        return self.dense_bytes + self.tree_bytes

    @property
    def total(self) -> int:
        return self.fixed + self.blob_bytes_estimate


def slot_count(layout: Layout, cfg: ReplayConfig) -> int:
    """Number of full chunks in `replay.capacity` steps."""
    if cfg.capacity < layout.chunk_steps:
        raise UserError(f"replay.capacity={cfg.capacity} does not hold one chunk of replay.chunk_steps="
                        f"{layout.chunk_steps}: raise the capacity or lower chunk_steps")
    return cfg.capacity // layout.chunk_steps


def fixed_bytes(layout: Layout, chunks: int) -> tuple[int, int]:
    """Bytes of `chunks` slots: (dense columns with block offsets, sum tree of 2 x a power of two float64)."""
    per_slot = layout.rows * layout.dense_dtype.itemsize
    per_slot += layout.starts * len(layout.state_rows) * sum(column.row_bytes for column in layout.state_columns)
    per_slot += len(layout.blocked) * (BLOB_OVERHEAD + 4 * layout.blocks)
    return chunks * per_slot, 16 * (1 << (chunks * layout.starts - 1).bit_length())


def plan_memory(layout: Layout, cfg: ReplayConfig, available_bytes: int | None = None) -> MemoryPlan:
    """Plan the memory of a host replay; raise UserError if it cannot fit.

    Assumes full chunks. If chunks end with shorter episodes, the capacity takes more chunks, and the store grows up to
    the planned `max_bytes`. `available_bytes` is measured by default; if it is unknown, only `replay.max_bytes` is
    checked.
    """
    available = available_memory() if available_bytes is None else available_bytes
    dense, tree = fixed_bytes(layout, slot_count(layout, cfg))
    per_chunk = layout.rows * sum(column.row_bytes / (IMAGE_RATIO if column.image else 1) for column in layout.blocked)
    limit = cfg.max_bytes
    if limit is None and available is not None:
        limit = int(FREE_FRACTION * available)
    planned = MemoryPlan(dense, int(slot_count(layout, cfg) * per_chunk), tree, available, limit)
    if available is not None and cfg.max_bytes is not None and cfg.max_bytes > available:
        raise UserError(
            f"replay.max_bytes={format_bytes(cfg.max_bytes)} is more than the {format_bytes(available)} of free "
            "memory: lower it, or free memory"
        )
    if cfg.max_bytes is None and limit is not None and planned.total > limit:
        raise UserError(
            f"replay.capacity={cfg.capacity} needs about {format_bytes(planned.total)} ({_breakdown(planned)}) but "
            f"may take {format_bytes(limit)}, {FREE_FRACTION:.0%} of the free memory: lower replay.capacity, or set "
            "replay.max_bytes to keep as many of the newest steps as fit"
        )
    warm_up = planned.fixed + int(max(1, cfg.min_steps / layout.chunk_steps) * per_chunk)
    if limit is not None and warm_up > limit:
        raise UserError(
            f"replay.max_bytes={format_bytes(limit)} does not hold replay.min_steps={cfg.min_steps}, about "
            f"{format_bytes(warm_up)} with the arrays for replay.capacity={cfg.capacity} ({_breakdown(planned)}): "
            "raise max_bytes, or lower capacity or min_steps"
        )
    return planned


def saved_bytes(layout: Layout, cfg: ReplayConfig, steps: float) -> int:
    """Approximate bytes of a replay in a checkpoint after `steps` steps: whole segments of chunks, and priorities."""
    kept = min(slot_count(layout, cfg), steps // layout.chunk_steps + CHUNKS_PER_SEGMENT)
    per_slot = fixed_bytes(layout, 1)[0] + 8 * layout.starts
    blocks = layout.rows * sum(column.row_bytes / (IMAGE_RATIO if column.image else 1) for column in layout.blocked)
    return int(kept * (per_slot + blocks))


def record_dtype(layout: Layout) -> np.dtype:
    """Record of all columns except observations, as a device store keeps a row."""
    fields = [(column.name, column.dtype, column.shape or (1,)) for column in layout.columns
              if not column.name.startswith(OBS_PREFIX)]
    widest = sorted(fields, key=lambda field: -np.dtype(field[1]).itemsize)  # so that every field is aligned
    spare = -np.dtype(widest).itemsize % 8
    return np.dtype([*widest, ("", "uint8", (spare,))] if spare else widest)


def device_bytes(layout: Layout, cfg: ReplayConfig) -> tuple[int, int]:
    """Bytes of a device replay: all columns uncompressed, and priorities with their sums and first rows."""
    frames = sum(column.row_bytes for column in layout.columns if column.name.startswith(OBS_PREFIX))
    per_slot = layout.rows * (frames + record_dtype(layout).itemsize)
    per_slot += layout.starts * len(layout.state_rows) * sum(column.row_bytes for column in layout.state_columns)
    return slot_count(layout, cfg) * per_slot, 24 * slot_count(layout, cfg) * layout.starts


def plan_device_memory(layout: Layout, cfg: ReplayConfig, free_bytes: int | None) -> MemoryPlan:
    """Plan a replay on a device with `free_bytes` of memory (None: unknown); raise UserError if it cannot fit."""
    columns, priorities = device_bytes(layout, cfg)
    planned = MemoryPlan(columns, 0, priorities, free_bytes, None)
    free_limit = None if free_bytes is None else int(FREE_FRACTION * free_bytes)
    for limit, name in ((cfg.max_bytes, f"replay.max_bytes={cfg.max_bytes}"),
                        (free_limit, f"the limit, {FREE_FRACTION:.0%} of the free memory,")):
        if limit is not None and planned.total > limit:
            fitting = int(cfg.capacity * limit / planned.total) // layout.chunk_steps * layout.chunk_steps
            raise UserError(
                f"replay.capacity={cfg.capacity} needs {format_bytes(planned.total)} on the device "
                f"({format_bytes(planned.total / cfg.capacity)} per step, raw) but {name} is {format_bytes(limit)}: "
                f"lower replay.capacity to {fitting}, or use replay.store=host, which stores it compressed"
            )
    return planned


def available_memory(root: Path = Path("/")) -> int | None:
    """Free memory in bytes: the minimum over the machine and all control groups of this process; None if unknown."""
    found = [_machine_free(root), *_control_groups_free(root)]
    return min((value for value in found if value is not None), default=None)


def _machine_free(root: Path) -> int | None:
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:  # no /proc: assume that half of the physical memory is free
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):
        return None


def _control_groups_free(root: Path) -> list[int | None]:
    """Free bytes of every control group (v2 or v1), from the one of this process up to the root."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        unified = controllers == ""
        if not unified and "memory" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("" if unified else "memory")
        group = mount / name.lstrip("/")
        for folder in (group, *group.parents):
            files = ("memory.max", "memory.current") if unified else ("memory.limit_in_bytes", "memory.usage_in_bytes")
            found.append(_group_free(folder, *files))
            if folder == mount:
                break
    return found


def _group_free(folder: Path, limit: str, usage: str) -> int | None:
    """Limit minus usage of a control group, None if unlimited or unknown; reclaimable file pages count as free."""
    try:
        allowed = (folder / limit).read_text().strip()
        if allowed == "max":
            return None
        used = int((folder / usage).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        cached = int(stat.get("inactive_file", stat.get("total_inactive_file", 0)))
    except (OSError, ValueError):
        return None
    return max(0, int(allowed) - used + cached)


def _breakdown(planned: MemoryPlan) -> str:
    return (
        f"{format_bytes(planned.dense_bytes)} of small columns, {format_bytes(planned.tree_bytes)} of priorities, "
        f"about {format_bytes(planned.blob_bytes_estimate)} of compressed observations"
    )
