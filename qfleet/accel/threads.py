"""Thread counts per process, chosen once at the start: oversubscription slows a learner by 4-8×."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

MAX_THREADS_PER_CORE = 8
"""Limit of torch threads. More than one per core are slow, and only useful to reproduce the bits of
a larger machine.
"""


@dataclass(frozen=True)
class ThreadPlan:
    """Numbers of threads for torch operators and for emulators."""

    torch: int
    env: int


def usable_cores() -> int:
    """Cores this process may use: its affinity, limited by a cgroup quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, _quota()))


def thread_plan(images: bool, cores: int | None = None) -> ThreadPlan:
    """Threads of a process: one for small networks, all cores for convolutions and for emulators.

    In one process emulators and learner share the cores, since each waits while the other is the
    bottleneck. OMP_NUM_THREADS, if set, limits torch: on a shared machine, threads that wait for
    one another are several times slower than one.
    """
    cores = cores or usable_cores()
    return ThreadPlan(torch=min(cores, _requested_threads() or cores) if images else 1, env=cores)


def evaluator_threads(on_gpu: bool, cores: int | None = None) -> int:
    """Threads of an evaluator process's network.

    A quarter of the cores if the learner uses a GPU, which leaves the others to emulators; else
    one.
    """
    return max(1, (cores or usable_cores()) // 4) if on_gpu else 1


def decoding_threads(torch: int, on_gpu: bool, alone: bool, cores: int | None = None) -> int:
    """Threads that decompress a batch while the learner waits.

    As many as torch has, whose threads are idle meanwhile. With a GPU learner, more, unless
    OMP_NUM_THREADS is set: all cores if the process has them `alone`, a quarter if emulators share
    it.
    """
    if not on_gpu:
        return torch
    cores = cores or usable_cores()
    return max(torch, min(cores if alone else cores // 4, _requested_threads() or cores))


def _requested_threads() -> int | None:
    value = os.environ.get("OMP_NUM_THREADS", "")
    return int(value) if value.isdecimal() and int(value) > 0 else None


def _quota() -> int:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return math.ceil(int(quota) / int(period))
    except (OSError, ValueError):
        return 1 << 30
