"""Measure contenders in alternating rounds, each in a fresh process with a fixed number of threads."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from qfleet.process.parent_watch import on_parent_exit
from speed.peers import peer_of
from speed.throughput import Throughput
from speed.workloads import WORKLOADS, RoundSpec, Workload, measure_variant

OURS = "qfleet"
SCRIPTS = Path(__file__).parents[1]
"""The folder that the package `speed` is imported from."""


@dataclass
class Contender:
    """A variant of qfleet, or a peer, at one workload: its rounds, or why there are none."""

    work: str
    who: str
    variant: str
    lanes: int
    problem: str | None = None
    rounds: list[Throughput] = field(default_factory=list)

    @property
    def name(self) -> str:
        lanes = f"{self.lanes} lane{'s' * (self.lanes != 1)}" if WORKLOADS[self.work].unit == "steps" else ""
        return ", ".join(filter(None, [self.who, self.variant, lanes]))

    @property
    def median(self) -> Throughput | None:
        if self.problem or not self.rounds:
            return None
        return Throughput(statistics.median(rate.per_s for rate in self.rounds),
                    statistics.median(rate.per_cpu_s for rate in self.rounds))

    def to_json(self) -> dict[str, Any]:
        median = self.median
        return asdict(self) | {"name": self.name, "median": None if median is None else asdict(median)}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Contender:
        rounds = [Throughput(**rate) for rate in data["rounds"]]
        return Contender(**{key: data[key] for key in ("work", "who", "variant", "lanes", "problem")}, rounds=rounds)


def contenders(work: Workload, peers: Sequence[str], device: str = "cpu") -> list[Contender]:
    """Variants of qfleet, the workload's rivals, and the peers; `problem` is set for a peer that is not installed."""
    found = []
    for lanes in (device.startswith("cuda") and work.gpu_lanes) or work.lanes:
        found += [Contender(work.name, OURS, variant, lanes) for variant in work.ours]
        found += [Contender(work.name, rival, "", lanes) for rival in work.rivals]
        found += [Contender(work.name, name, "", lanes, peer_of(name).problem(work)) for name in peers if work.algo]
    return found


def measure(everyone: Sequence[Contender], spec: RoundSpec, rounds: int, timeout_s: float,
            report: Callable[[str], None]) -> None:
    """Measure all contenders once per round. One that fails is not measured again."""
    for number in range(1, rounds + 1):
        for entry in everyone:
            if entry.problem is None:
                found = _measure_in_process(entry, spec, timeout_s)
                if isinstance(found, Throughput):
                    entry.rounds.append(found)
                    unit = WORKLOADS[entry.work].unit
                    text = f"{found.per_s:,.1f} {unit}/s, {found.per_cpu_s:,.1f} per CPU second"
                else:
                    entry.problem = text = found
                report(f"{entry.work}, round {number} of {rounds}: {entry.name}: {text}")


def _measure_in_process(entry: Contender, spec: RoundSpec, timeout_s: float) -> Throughput | str:
    """One measurement in a new process: the throughput, or one line about what went wrong."""
    order = json.dumps({"work": entry.work, "who": entry.who, "variant": entry.variant,
                        "spec": asdict(spec) | {"lanes": entry.lanes}})
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), str(spec.threads))
    paths = os.pathsep.join(filter(None, [str(SCRIPTS), os.environ.get("PYTHONPATH")]))
    try:
        done = subprocess.run([sys.executable, "-m", "speed.one_round", order], capture_output=True, text=True,
                              errors="replace", timeout=timeout_s, env=os.environ | threads | {"PYTHONPATH": paths})
    except subprocess.TimeoutExpired:
        return f"was not done after {timeout_s:g} s"
    if done.returncode < 0:
        return f"was killed by signal {-done.returncode}"
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    if done.returncode:
        return f"failed: {lines[-1][:200] if lines else f'exit code {done.returncode}'}"
    try:
        return Throughput(**json.loads(done.stdout.splitlines()[-1]))
    except (ValueError, TypeError, IndexError):
        return "failed: it printed no throughput"


def measure_order(text: str) -> Throughput:
    """Measure the contender that `text` describes as JSON. Exits if the parent process ends; nothing needs saving."""
    on_parent_exit(lambda: os._exit(1))
    order = json.loads(text)
    work, spec = WORKLOADS[order["work"]], RoundSpec(**order["spec"])
    import torch

    torch.set_num_threads(spec.threads)
    if order["who"] == OURS:
        return measure_variant(work, order["variant"], spec)
    if order["who"] in work.rivals:
        return work.rivals[order["who"]](work, spec)
    return peer_of(order["who"]).measure(work, spec)
