"""Who may use which cores. Oversubscription costs a learner 4-8×, so the plan is made once, at the start."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

MAX_THREADS_PER_CORE = 8
"""Threads of torch: more than one for a core are slow, and only of use to repeat the digits of a larger machine."""


@dataclass(frozen=True)
class ThreadPlan:
    """Threads for torch's operators and for the environment's emulators."""

    torch: int
    env: int


def usable_cores() -> int:
    """Cores this process may use: its affinity, limited by a cgroup quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, _quota()))


def thread_plan(images: bool, cores: int | None = None) -> ThreadPlan:
    """Small networks are fastest on one thread; convolutions take all cores, and the emulators too.

    Emulators and learner share the cores in one process, since each waits while the other's work is the bottleneck.
    OMP_NUM_THREADS, if the user has set it, limits torch: on a machine that is shared, threads that wait for one
    another are several times slower than one.
    """
    cores = cores or usable_cores()
    return ThreadPlan(torch=min(cores, _requested_threads() or cores) if images else 1, env=cores)


def evaluator_threads(on_gpu: bool, cores: int | None = None) -> int:
    """For the network of an evaluator beside a run: a quarter of the cores where a GPU learns and leaves them to the
    emulators, and one where every core learns."""
    return max(1, (cores or usable_cores()) // 4) if on_gpu else 1


def decoding_threads(torch: int, on_gpu: bool, alone: bool, cores: int | None = None) -> int:
    """For a batch that is decompressed while its learner waits: as many as torch has, since they wait, too. Where a GPU
    learns, more, unless the user has set OMP_NUM_THREADS: all cores of a process that has them `alone`, and a quarter
    where emulators compute in it."""
    if not on_gpu:
        return torch
    cores = cores or usable_cores()
    return max(torch, min(cores if alone else cores // 4, _requested_threads() or cores))


def _requested_threads() -> int | None:
    wish = os.environ.get("OMP_NUM_THREADS", "")
    return int(wish) if wish.isdecimal() and int(wish) > 0 else None


def _quota() -> int:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return math.ceil(int(quota) / int(period))
    except (OSError, ValueError):
        return 1 << 30
