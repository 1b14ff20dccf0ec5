"""What more processes bring: steps and updates per second with 1, 2, ... actors, or learners.

    python benchmarks/spread.py [--only actors cells ranks] [--values 1 2 3 4] [--seconds 20] [--rounds 1]
        [--out benchmarks/results/spread.json] [key=value ...]

Pong, one torch thread in every process, actors with the CPU. `actors` are processes beside one learner that draws each
step half a time, so that acting is what limits. `cells` are learners of a parameter server, `ranks` learners that
average, as 0.1 called them and its rows are named: with eight samples per step, each with environments, replay and
batches of 32 of its own, so that learning is what limits; of ranks 32 from each make one update. A run is watched for
--seconds after its learning has begun and is then interrupted, as a user would; the rates are those between the first
and the last record of that time, the median of the rounds. Rows are saved as they come, beside those that OUT has of
the same settings and machine.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from speed import describe_machine
from trials import blank, records_of

from qfleet.report.plots import COLOURS

COMMON = ["env.threads=1", "run.threads=1", "run.tensorboard=false", "run.log_period_steps=500",
          "replay.min_steps=2000", "replay.capacity=50000", "stop_at=null", "eval.period_steps=null",
          "eval.episodes=1", "eval.lanes=1", "eval.max_episode_steps=50", "checkpoint.period_steps=null",
          "checkpoint.replay=false"]
LEARNERS = ["env.lanes=4", "replay.samples_per_insert=8", *COMMON]
WAYS: dict[str, tuple[str, list[str]]] = {
    "actors": ("actors={}", ["env.lanes=8", "replay.samples_per_insert=0.5", *COMMON]),
    "cells": ("learners={}", ["sync=server", *LEARNERS]),
    "ranks": ("learners={}", ["sync=allreduce", "allreduce.batch=per_rank", *LEARNERS]),
}
"""By the names of rows that were recorded: key of the number of processes, and what else is set."""
LABELS = {"actors": "actors", "cells": "learners", "ranks": "ranks"}
WAIT_S = 120
"""For the first update, and for the end."""


def words_for(way: str, value: int) -> list[str]:
    if way != "actors" and value == 1:
        return LEARNERS  # one learner has nobody to meet
    key, words = WAYS[way]
    return [key.format(value), *words]


def measure(way: str, value: int, seconds: float, overrides: list[str]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as root:
        command = [sys.executable, "-m", "qfleet", "train", "pong", *words_for(way, value), f"run.root={root}",
                   "run.name=x", *overrides, "--quiet"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"}) as run:
            try:
                records = watched(run, Path(root) / "x" / "metrics.jsonl", seconds)
            finally:
                run.send_signal(signal.SIGINT)
                try:
                    run.wait(WAIT_S)
                except subprocess.TimeoutExpired:
                    run.kill()
    first, last = records[0], records[-1]
    wall = last["time_s"] - first["time_s"]
    return {name: round((last[tag] - first[tag]) / wall, 2)
            for name, tag in (("steps_per_s", "step"), ("updates_per_s", "updates"))}


def watched(run: subprocess.Popen[bytes], metrics: Path, seconds: float) -> list[dict[str, Any]]:
    """The records of so many seconds, from the first one with an update on."""
    deadline = time.monotonic() + WAIT_S + seconds
    while run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
        learning = [record for record in records_of(metrics) if record.get("updates")]
        if learning and learning[-1]["time_s"] - learning[0]["time_s"] >= seconds:
            return learning
    raise SystemExit(f"{' '.join(map(str, run.args))}: no {seconds:g} s of learning; exit code {run.poll()}")  # type: ignore[arg-type]


def medians(rows: dict[str, Any]) -> dict[str, dict[int, dict[str, float]]]:
    """By way and value: the medians of the rounds, and how many times as fast as the first value that is."""
    found: dict[str, dict[int, dict[str, float]]] = {}
    for way, values in rows.items():
        table = {int(value): {name: statistics.median(run[name] for run in runs) for name in runs[0]}
                 for value, runs in values.items()}
        least = table[min(table)]["steps_per_s"]
        found[way] = {value: row | {"gain": row["steps_per_s"] / least} for value, row in sorted(table.items())}
    return found


def draw(document: dict[str, Any]) -> Any:
    """Steps per second by the number of processes, and where they would be if each brought as much as the first."""
    found = medians(document["rows"])
    figure = blank(2 + 3 * len(found), 3.6)
    axes = figure.subplots(1, len(found), squeeze=False)[0]
    for axis, (way, table), colour in zip(axes, found.items(), COLOURS, strict=False):
        values = list(table)
        axis.plot(values, [row["steps_per_s"] for row in table.values()], "o-", color=colour, label="measured")
        ideal = [table[values[0]]["steps_per_s"] * value / values[0] for value in values]
        axis.plot(values, ideal, ":", color="0.5", label="as much from each")
        title = f"{LABELS[way]}: steps/s on {document['cores']} cores"
        axis.set(xlabel=LABELS[way], title=title, xticks=values, ylim=(0, None))
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes of all runs")
    parser.add_argument("--only", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--values", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/spread.json"))
    args = parser.parse_intermixed_args()
    here = {"seconds": args.seconds, "overrides": args.overrides, "cores": os.cpu_count()}
    document: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {**here, "rows": {}}
    if {key: document[key] for key in here} != here:
        raise SystemExit(f"{args.out} holds runs of another kind: give another --out")
    rows = document["rows"]
    for _ in range(args.rounds):
        for way in args.only:
            for value in args.values:
                found = measure(way, value, args.seconds, args.overrides)
                rows.setdefault(way, {}).setdefault(str(value), []).append(found)
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps(document | {"machine": describe_machine()}, indent=1) + "\n")
                print(way, value, found, flush=True)


if __name__ == "__main__":
    main()
