"""Runs contenders alternately, each round in a fresh process, and reports medians and their ratio."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("qfleet", "torch", "numpy", "gymnasium", "ale-py", "stable-baselines3", "cpprb")

WARM_UPDATES = 100


@dataclass(frozen=True)
class Rate:
    """Work per second, by the clock on the wall and by the CPU time that it took."""

    per_s: float
    per_cpu_s: float

    @staticmethod
    def between(first: tuple[float, float, int], last: tuple[float, float, int]) -> Rate:
        """From two marks (wall clock, CPU time, work done)."""
        work = last[2] - first[2]
        return Rate(work / (last[0] - first[0]), work / (last[1] - first[1]))


Contender = Callable[[int], Rate]


class Marks:
    """A metrics sink that notes wall clock, CPU time and steps at every record but those of evaluations."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, float, int]] = []

    def write(self, record: dict) -> None:
        if "eval/mean_reward" not in record:
            self.marks.append((time.perf_counter(), time.process_time(), record["step"]))

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Nothing to close."""

    def rate(self, warm_up: int) -> Rate:
        after = [mark for mark in self.marks if mark[2] >= warm_up]
        return Rate.between(after[0], after[-1])


def rate_of(run: Path, clock: str) -> float:
    """Of a run that is over: how fast a clock of its records went, "step" or "updates", after warm-up."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    marks = [(line["time_s"], line[clock]) for line in lines
             if line.get("updates", 0) >= WARM_UPDATES and "eval/mean_reward" not in line]
    return (marks[-1][1] - marks[0][1]) / (marks[-1][0] - marks[0][0])


def main(doc: str | None, contenders: Mapping[str, Contender], default_steps: int) -> int:
    """Compare; those whose names begin with `qfleet` are divided by each of the others."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=default_steps)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", choices=list(contenders), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        print(json.dumps(asdict(contenders[args.only](args.steps))))
        return 0
    rounds = [{name: _round(name, args.steps) for name in contenders} for _ in range(args.rounds)]
    result = _summary(list(contenders), rounds) | {"steps": args.steps, "machine": machine()}
    print(json.dumps({key: result[key] for key in ("median", "ratio")}, indent=2))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def machine() -> dict:
    """What the figures were taken on."""
    model = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return {"date": date.today().isoformat(), "cpu": model, "cores": os.cpu_count(),
            "python": platform.python_version(), "versions": found, "command": " ".join(sys.argv)}


def _round(name: str, steps: int) -> dict[str, float]:
    command = [sys.executable, *[arg for arg in sys.argv if arg], "--only", name, "--steps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr}")
    rate: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(f"{name}: {rate['per_s']:.1f}/s, {rate['per_cpu_s']:.1f} per CPU second", file=sys.stderr, flush=True)
    return rate


def _summary(names: list[str], rounds: list[dict[str, dict[str, float]]]) -> dict:
    median = {name: {unit: statistics.median(each[name][unit] for each in rounds) for unit in ("per_s", "per_cpu_s")}
              for name in names}
    ours = [name for name in names if name.startswith("qfleet")]
    ratio = {f"{one} / {peer}": {unit: median[one][unit] / median[peer][unit] for unit in median[one]}
             for one in ours for peer in names if peer not in ours}
    return {"median": median, "ratio": ratio, "rounds": rounds}
