"""Work per second, and what it was measured on."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import qfleet

PACKAGES = ("torch", "numpy", "gymnasium", "ale-py", "mujoco", "stable-baselines3", "tianshou", "cpprb")
WARM_UPDATES = 100
GIT_TIMEOUT_S = 10

Mark = tuple[float, float, int]
"""Wall clock, CPU time of the process, work done."""


@dataclass(frozen=True)
class Rate:
    """Work per second, by the clock on the wall and by the CPU time that it took."""

    per_s: float
    per_cpu_s: float

    @staticmethod
    def between(first: Mark, last: Mark) -> Rate:
        work = last[2] - first[2]
        return Rate(work / (last[0] - first[0]), work / (last[1] - first[1]))


@dataclass
class Marks:
    """Notes wall clock and CPU time as work gets done; also a metrics sink, which leaves out evaluations."""

    marks: list[Mark] = field(default_factory=list)

    def note(self, done: int) -> None:
        self.marks.append((time.perf_counter(), time.process_time(), done))

    def write(self, record: Mapping[str, Any]) -> None:
        if "eval/mean_reward" not in record:
            self.note(record["step"])

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Nothing to close."""

    def rate(self, warm_up: int) -> Rate:
        after = [mark for mark in self.marks if mark[2] >= warm_up]
        if len(after) < 2 or after[0][2] == after[-1][2]:
            raise ValueError(f"{self.marks[-1][2] if self.marks else 0} steps leave nothing to measure after a "
                             f"warm-up of {warm_up}")
        return Rate.between(after[0], after[-1])


def repeated(do: Callable[[], int], least: int, least_s: float = 0.0, wait: Callable[[], None] = lambda: None,
             clock: Callable[[], float] = time.process_time) -> Rate:
    """How fast `do` works, which says how much it has done: until it is `least` and has taken `least_s` of CPU, or by
    another clock."""
    marks, done = Marks(), 0
    wait()
    marks.note(0)
    begin = clock()
    while done < least or clock() - begin < least_s:
        done += do()
    wait()
    marks.note(done)
    return marks.rate(0)


def rate_of(run: Path, clock: str) -> float:
    """Of a run that is over: how fast a clock of its records went, "step" or "updates", after warm-up."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    marks = [(line["time_s"], line[clock]) for line in lines
             if line.get("updates", 0) >= WARM_UPDATES and "eval/mean_reward" not in line]
    return (marks[-1][1] - marks[0][1]) / (marks[-1][0] - marks[0][0])


def machine(command: str | None = None) -> dict[str, Any]:
    """What figures were taken on, and how busy it was: the load average counts those who compute or wait for a core."""
    return {"date": date.today().isoformat(), "cpu": _cpu(), "cores": os.cpu_count(), "gpu": _gpu(),
            "python": platform.python_version(), "versions": _versions(), "commit": _commit(),
            "load": [round(value, 2) for value in os.getloadavg()], "command": command or shlex.join(sys.argv)}


def _cpu() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _gpu() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _commit() -> str | None:
    """Of the sources that qfleet is imported from, with a + where code or recipes have changed since; None if unknown.

    A tree that travels without its .git is told by QFLEET_COMMIT. An installed copy is not of the repository around it.
    """
    answers = []
    for question in (["ls-files", "--error-unmatch", "__init__.py"], ["rev-parse", "--short", "HEAD"],
                     ["status", "--porcelain", "--untracked-files=all", "--", ":/qfleet", ":/*.py"]):
        try:
            done = subprocess.run(["git", *question], cwd=Path(qfleet.__file__).parent, capture_output=True, text=True,
                                  timeout=GIT_TIMEOUT_S, check=True)
        except (OSError, subprocess.SubprocessError):
            return os.environ.get("QFLEET_COMMIT") or None
        answers.append(done.stdout.strip())
    return answers[1] + ("+" if answers[2] else "")


def _versions() -> dict[str, str]:
    found = {"qfleet": qfleet.__version__}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
