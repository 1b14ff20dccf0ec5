"""Contenders in turn, each round in a fresh process with its threads pinned; who fails is named and left out."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from qfleet.bench.peers import peer_of
from qfleet.bench.rates import Rate
from qfleet.bench.work import WORKS, Job, Work, ours
from qfleet.runtime.orphans import when_orphaned

OURS = "qfleet"


@dataclass
class Entry:
    """A contender at one workload: its rounds, or why there are none."""

    work: str
    who: str
    variant: str
    lanes: int
    problem: str | None = None
    rounds: list[Rate] = field(default_factory=list)

    @property
    def name(self) -> str:
        lanes = f"{self.lanes} lane{'s' * (self.lanes != 1)}" if WORKS[self.work].unit == "steps" else ""
        return ", ".join(filter(None, [self.who, self.variant, lanes]))

    @property
    def median(self) -> Rate | None:
        if self.problem or not self.rounds:
            return None
        return Rate(statistics.median(rate.per_s for rate in self.rounds),
                    statistics.median(rate.per_cpu_s for rate in self.rounds))

    def to_json(self) -> dict[str, Any]:
        median = self.median
        return asdict(self) | {"name": self.name, "median": None if median is None else asdict(median)}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Entry:
        rounds = [Rate(**rate) for rate in data["rounds"]]
        return Entry(**{key: data[key] for key in ("work", "who", "variant", "lanes", "problem")}, rounds=rounds)


def entries(work: Work, peers: Sequence[str], device: str = "cpu") -> list[Entry]:
    """Who takes part: ours, the workload's rivals, and the peers, of whom those that are not installed say so."""
    found = []
    for lanes in (device.startswith("cuda") and work.gpu_lanes) or work.lanes:
        found += [Entry(work.name, OURS, variant, lanes) for variant in work.ours]
        found += [Entry(work.name, rival, "", lanes) for rival in work.rivals]
        found += [Entry(work.name, name, "", lanes, peer_of(name).problem(work)) for name in peers if work.algo]
    return found


def measure(everyone: Sequence[Entry], job: Job, rounds: int, timeout_s: float, told: Callable[[str], None]) -> None:
    """Let contenders take turns. Whoever fails once is not asked again."""
    for number in range(1, rounds + 1):
        for entry in everyone:
            if entry.problem is None:
                found = _alone(entry, job, timeout_s)
                if isinstance(found, Rate):
                    entry.rounds.append(found)
                    unit = WORKS[entry.work].unit
                    text = f"{found.per_s:,.1f} {unit}/s, {found.per_cpu_s:,.1f} per CPU second"
                else:
                    entry.problem = text = found
                told(f"{entry.work}, round {number} of {rounds}: {entry.name}: {text}")


def _alone(entry: Entry, job: Job, timeout_s: float) -> Rate | str:
    """One measurement in a process of its own: the rate, or in a line what went wrong."""
    order = json.dumps({"work": entry.work, "who": entry.who, "variant": entry.variant,
                        "job": asdict(job) | {"lanes": entry.lanes}})
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), str(job.threads))
    try:
        done = subprocess.run([sys.executable, "-m", "qfleet", "_round", order], capture_output=True, text=True,
                              errors="replace", timeout=timeout_s, env=os.environ | threads)
    except subprocess.TimeoutExpired:
        return f"was not done after {timeout_s:g} s"
    if done.returncode < 0:
        return f"was killed by signal {-done.returncode}"
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    if done.returncode:
        return f"failed: {lines[-1][:200] if lines else f'exit code {done.returncode}'}"
    try:
        return Rate(**json.loads(done.stdout.splitlines()[-1]))
    except (ValueError, TypeError, IndexError):
        return "failed: it gave no figures"


def take_part(order: str) -> Rate:
    """What the process of a round does. It saves nothing, so it leaves at once when nobody waits for its figures."""
    when_orphaned(lambda: os._exit(1))
    wish = json.loads(order)
    work, job = WORKS[wish["work"]], Job(**wish["job"])
    import torch

    torch.set_num_threads(job.threads)
    if wish["who"] == OURS:
        return ours(work, wish["variant"], job)
    if wish["who"] in work.rivals:
        return work.rivals[wish["who"]](work, job)
    return peer_of(wish["who"]).measure(work, job)
