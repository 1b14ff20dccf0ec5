"""Work per second of wall-clock time and of CPU time."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WARM_UPDATES = 100

Mark = tuple[float, float, int]
"""Wall clock, CPU time of the process, work done so far."""


@dataclass(frozen=True)
class Throughput:
    """Work per second, by wall clock and by CPU time."""

    per_s: float
    per_cpu_s: float

    @staticmethod
    def between(first: Mark, last: Mark) -> Throughput:
        work = last[2] - first[2]
        return Throughput(work / (last[0] - first[0]), work / (last[1] - first[1]))


@dataclass
class ThroughputMeter:
    """Records wall clock and CPU time as work progresses. Also a metrics sink, which ignores evaluations."""

    marks: list[Mark] = field(default_factory=list)

    def record(self, done: int) -> None:
        self.marks.append((time.perf_counter(), time.process_time(), done))

    def write(self, record: Mapping[str, Any]) -> None:
        if "eval/mean_reward" not in record:
            self.record(record["step"])

    def flush(self) -> None:
        """Nothing is buffered."""

    def close(self) -> None:
        """Nothing to close."""

    def throughput(self, warm_up: int) -> Throughput:
        """Throughput from the first mark after the warm-up to the last."""
        after = [mark for mark in self.marks if mark[2] >= warm_up]
        if len(after) < 2 or after[0][2] == after[-1][2]:
            raise ValueError(f"{self.marks[-1][2] if self.marks else 0} steps leave nothing to measure after a "
                             f"warm-up of {warm_up}")
        return Throughput.between(after[0], after[-1])


def measure_throughput(do: Callable[[], int], least: int, least_s: float = 0.0,
                       wait: Callable[[], None] = lambda: None,
                       clock: Callable[[], float] = time.process_time) -> Throughput:
    """Throughput of `do`, which returns how much work a call did.

    Repeats until the work is at least `least` and has taken `least_s` seconds of `clock` (CPU time by default).
    """
    meter, done = ThroughputMeter(), 0
    wait()
    meter.record(0)
    begin = clock()
    while done < least or clock() - begin < least_s:
        done += do()
    wait()
    meter.record(done)
    return meter.throughput(0)


def run_throughput(run: Path, counter: str) -> float:
    """Rate of a counter, "step" or "updates", per second of a finished run after warm-up, from its metrics.jsonl."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    marks = [(line["time_s"], line[counter]) for line in lines
             if line.get("updates", 0) >= WARM_UPDATES and "eval/mean_reward" not in line]
    return (marks[-1][1] - marks[0][1]) / (marks[-1][0] - marks[0][0])
