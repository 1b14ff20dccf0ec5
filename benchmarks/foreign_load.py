"""What a foreign process that keeps one core busy costs a run: steps/s beside it and without it, in turns.

    python benchmarks/foreign_load.py [--windows 6] [--seconds 5] [--out benchmarks/results/foreign_load.json]

CartPole, Catch as pictures and Pong, all in one process, with the threads that qfleet plans by itself, and with one
thread.

A loop that does nothing is stopped and woken in turns while the run goes on; both medians come from one run, so that
what else the machine does meets both. The busy loop may take one core: with K cores the fair share left is 1 - 1/(2K)
of a machine that is used whole, and half of it where threads wait for the slowest of them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import yaml
from sinks import Sink
from speed import describe_machine

PIXELS = ["toy/Catch-v0", "env.kwargs={pixels: true}", "env.lanes=8", "replay.capacity=20000", "replay.min_steps=500",
          "learner.batch_size=32", "run.log_period_steps=80"]
PONG = ["pong", "env.lanes=8", "replay.capacity=20000", "replay.min_steps=500", "run.log_period_steps=80"]
COMMON = ["stop_at=null", "total_steps=100000000", "eval.period_steps=null", "eval.episodes=1",
          "checkpoint.period_steps=null", "checkpoint.replay=false", "run.tensorboard=false"]
WAYS = {"": [], ", run.threads=1": ["run.threads=1"]}
RUNS = {"cartpole": ["cartpole", "run.log_period_steps=400"]} | {
    f"{name}{way}": [*run, *words]
    for name, run in {"catch-pixels": PIXELS, "pong": PONG, "pong, fp32": [*PONG, "learner.precision=fp32"]}.items()
    for way, words in WAYS.items()}


def spin() -> None:
    while True:
        pass


class Foreign(Sink):
    """A sink that wakes and stops a busy process every so many seconds, and tells the run to end after the last."""

    def __init__(self, windows: int, seconds: float) -> None:
        self.windows, self.seconds = windows, seconds
        self.rates: dict[bool, list[float]] = {False: [], True: []}
        self.process = multiprocessing.get_context("spawn").Process(target=spin, daemon=True)
        self.learning, self.busy, self.since = False, False, (0.0, 0)

    def start(self) -> None:
        self.process.start()
        self._signal(signal.SIGSTOP)

    def write(self, record: Mapping[str, Any]) -> None:
        now = (perf_counter(), int(record["step"]))
        if not self.learning:  # the first updates are recorded and compiled: they belong to no window
            self.learning, self.since = bool(record.get("updates")), now
            return
        if now[0] - self.since[0] < self.seconds:
            return
        self.rates[self.busy].append((now[1] - self.since[1]) / (now[0] - self.since[0]))
        if len(self.rates[True]) == self.windows:
            os.kill(os.getpid(), signal.SIGINT)  # as a user would end it
        self.busy = not self.busy
        self._signal(signal.SIGCONT if self.busy else signal.SIGSTOP)
        self.since = (perf_counter(), now[1])

    def end(self) -> None:
        self.process.kill()
        self.process.join()

    def _signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


def measure(name: str, windows: int, seconds: float) -> dict[str, Any]:
    """Medians of steps/s without and beside the busy process, and what the first is to the second."""
    from qfleet import api

    foreign = Foreign(windows, seconds)
    source, *overrides = RUNS[name]
    with tempfile.TemporaryDirectory() as root:
        foreign.start()
        try:
            run = api.train(source, [*COMMON, *overrides, f"run.root={root}", "run.name=x"], sinks=[foreign])
            threads = yaml.safe_load((run.directory / "config.yaml").read_text())["run"]["threads"]
        finally:
            foreign.end()
    if run.reason != "interrupted":
        raise SystemExit(f"{name} ended before its last window ({run.reason}): give it more time, or fewer --windows")
    quiet, busy = (statistics.median(foreign.rates[state]) for state in (False, True))
    return {"run": name, "threads": threads, "quiet": quiet, "busy": busy, "slowdown": quiet / busy,
            "windows": {"quiet": foreign.rates[False], "busy": foreign.rates[True]}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--only", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = [measure(name, args.windows, args.seconds) for name in args.only]
    for row in found:
        print(f"{row['run']}: {row['quiet']:.0f} steps/s, {row['busy']:.0f} beside a busy core, "
              f"{row['slowdown']:.2f} times slower; torch threads {row['threads']}")
    if args.out:
        args.out.write_text(json.dumps({"runs": found, "machine": describe_machine()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
