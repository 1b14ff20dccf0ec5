"""How much memory a replay will need, judged before the run begins."""

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
"""Assumed compression of image columns. Ten Atari games gave 27-150 under random play; other pictures are busier."""

SHARE = 0.8
"""Part of the free memory that replay may take when no limit was set: networks and environments live here too."""

BLOB_OVERHEAD = 64
"""Bytes that a Python bytes object, its allocation and the reference to it take beside its content."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes: what is allocated as arrays, what compressed blocks are expected to add, and the limit that will hold."""

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
    """How many full chunks hold the capacity."""
    if cfg.capacity < layout.chunk_steps:
        raise UserError(f"replay.capacity={cfg.capacity} does not hold one chunk of replay.chunk_steps="
                        f"{layout.chunk_steps}: raise the capacity or lower chunk_steps")
    return cfg.capacity // layout.chunk_steps


def fixed_bytes(layout: Layout, chunks: int) -> tuple[int, int]:
    """Of room for so many chunks: bytes of the dense columns with the book-keeping of blocks, and of the sum tree (2 x
    a power of two float64)."""
    per_slot = layout.rows * layout.dense_dtype.itemsize
    per_slot += layout.starts * len(layout.state_rows) * sum(column.row_bytes for column in layout.state_columns)
    per_slot += len(layout.blocked) * (BLOB_OVERHEAD + 4 * layout.blocks)
    return chunks * per_slot, 16 * (1 << (chunks * layout.starts - 1).bit_length())


def plan_memory(layout: Layout, cfg: ReplayConfig, available_bytes: int | None = None) -> MemoryPlan:
    """Plan the memory of a replay, or refuse with the figures one that cannot fit.

    Chunks are assumed to be full. Where they end with episodes that are shorter, more of them hold the capacity, and
    the store takes more, up to the limit that is planned here.

    `available_bytes` is measured unless given. Where it cannot be known, only the user's own limit is checked.
    """
    available = available_memory() if available_bytes is None else available_bytes
    dense, tree = fixed_bytes(layout, slot_count(layout, cfg))
    per_chunk = layout.rows * sum(column.row_bytes / (IMAGE_RATIO if column.image else 1) for column in layout.blocked)
    limit = cfg.max_bytes
    if limit is None and available is not None:
        limit = int(SHARE * available)
    planned = MemoryPlan(dense, int(slot_count(layout, cfg) * per_chunk), tree, available, limit)
    if available is not None and cfg.max_bytes is not None and cfg.max_bytes > available:
        raise UserError(
            f"replay.max_bytes={format_bytes(cfg.max_bytes)} is more than the {format_bytes(available)} of free "
            "memory: lower it, or free memory"
        )
    if cfg.max_bytes is None and limit is not None and planned.total > limit:
        raise UserError(
            f"replay.capacity={cfg.capacity} needs about {format_bytes(planned.total)} ({_parts(planned)}) but "
            f"may take {format_bytes(limit)}, {SHARE:.0%} of the free memory: lower replay.capacity, or set "
            "replay.max_bytes to keep as many of the newest steps as fit"
        )
    warm_up = planned.fixed + int(max(1, cfg.min_steps / layout.chunk_steps) * per_chunk)
    if limit is not None and warm_up > limit:
        raise UserError(
            f"replay.max_bytes={format_bytes(limit)} does not hold replay.min_steps={cfg.min_steps}, about "
            f"{format_bytes(warm_up)} with the arrays for replay.capacity={cfg.capacity} ({_parts(planned)}): "
            "raise max_bytes, or lower capacity or min_steps"
        )
    return planned


def saved_bytes(layout: Layout, cfg: ReplayConfig, steps: float) -> int:
    """About the bytes of a replay in a checkpoint after so many steps: chunks as they are packed, in whole files, and
    priorities."""
    kept = min(slot_count(layout, cfg), steps // layout.chunk_steps + CHUNKS_PER_SEGMENT)
    per_slot = fixed_bytes(layout, 1)[0] + 8 * layout.starts
    blocks = layout.rows * sum(column.row_bytes / (IMAGE_RATIO if column.image else 1) for column in layout.blocked)
    return int(kept * (per_slot + blocks))


def record_dtype(layout: Layout) -> np.dtype:
    """All columns but observations side by side, as a device keeps a row of them."""
    fields = [(column.name, column.dtype, column.shape or (1,)) for column in layout.columns
              if not column.name.startswith(OBS_PREFIX)]
    widest = sorted(fields, key=lambda field: -np.dtype(field[1]).itemsize)  # so that none lies across a border
    spare = -np.dtype(widest).itemsize % 8
    return np.dtype([*widest, ("", "uint8", (spare,))] if spare else widest)


def device_bytes(layout: Layout, cfg: ReplayConfig) -> tuple[int, int]:
    """Bytes of a replay that is kept raw on a device: of all columns, and of priorities, their sums and places."""
    frames = sum(column.row_bytes for column in layout.columns if column.name.startswith(OBS_PREFIX))
    per_slot = layout.rows * (frames + record_dtype(layout).itemsize)
    per_slot += layout.starts * len(layout.state_rows) * sum(column.row_bytes for column in layout.state_columns)
    return slot_count(layout, cfg) * per_slot, 24 * slot_count(layout, cfg) * layout.starts


def plan_device_memory(layout: Layout, cfg: ReplayConfig, free_bytes: int | None) -> MemoryPlan:
    """Plan a replay that lives on the learner's device with `free_bytes` of memory (None: unknown), or refuse it."""
    columns, priorities = device_bytes(layout, cfg)
    planned = MemoryPlan(columns, 0, priorities, free_bytes, None)
    most = None if free_bytes is None else int(SHARE * free_bytes)
    for limit, name in ((cfg.max_bytes, f"replay.max_bytes={cfg.max_bytes}"),
                        (most, f"what it may take there, {SHARE:.0%} of the free memory")):
        if limit is not None and planned.total > limit:
            fitting = int(cfg.capacity * limit / planned.total) // layout.chunk_steps * layout.chunk_steps
            raise UserError(
                f"replay.capacity={cfg.capacity} needs {format_bytes(planned.total)} on the device "
                f"({format_bytes(planned.total / cfg.capacity)} per step, raw) but {name} is {format_bytes(limit)}: "
                f"lower replay.capacity to {fitting}, or use replay.store=host, which keeps it compressed"
            )
    return planned


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes that can still be used: the least of what the machine and its control groups leave, None if unknown."""
    found = [_machine_memory(root), *_control_groups(root)]
    return min((value for value in found if value is not None), default=None)


def _machine_memory(root: Path) -> int | None:
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:  # no /proc: count on half of what is built in
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):
        return None


def _control_groups(root: Path) -> list[int | None]:
    """What each control group (v2 or v1) from the process's own up to the root still allows."""
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
            found.append(_room(folder, *files))
            if folder == mount:
                break
    return found


def _room(folder: Path, limit: str, usage: str) -> int | None:
    """A group's limit less its usage; file pages that can be dropped count as free."""
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


def _parts(planned: MemoryPlan) -> str:
    return (
        f"{format_bytes(planned.dense_bytes)} of small columns, {format_bytes(planned.tree_bytes)} of priorities, "
        f"about {format_bytes(planned.blob_bytes_estimate)} of compressed observations"
    )


