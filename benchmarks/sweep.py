"""What more lanes, or larger batches, bring and cost: how soon a recipe is learnt, and how fast it runs.

    python benchmarks/sweep.py lanes [--values 1 2 4 8 16 32 64 128 256] [--seeds 3] [--steps 12000]
    python benchmarks/sweep.py batch [--values 8 16 32 64 128 256 512] [--seeds 3] [--steps 12000]

Trains `catch` in one process, all else as in the recipe: a step is drawn equally often (replay.samples_per_insert), so
larger batches mean fewer updates. Learnt is the first evaluation of 20 greedy episodes that reaches the goal. Times are
CPU time of one thread from the first record on, evaluations left out, so that a busy machine does not matter much. Rows
are saved as they come, and runs already in OUT are not repeated. `make figures` draws it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from sinks import Sink
from speed import describe_machine

import qfleet

GOAL = 0.95
VALUES = {"lanes": (1, 2, 4, 8, 16, 32, 64, 128, 256), "batch": (8, 16, 32, 64, 128, 256, 512)}
KEYS = {"lanes": "env.lanes", "batch": "learner.batch_size"}
COMMON = ["stop_at=null", "eval.period_steps=250", "eval.episodes=20", "run.log_period_steps=250", "run.threads=1",
          "run.tensorboard=false", "checkpoint.period_steps=null", "checkpoint.replay=false"]


class Watch(Sink):
    """A sink that notes steps, updates and CPU time of every record, and the score of every evaluation."""

    def __init__(self) -> None:
        self.rows: list[list[float | None]] = []
        self.judging = 0.0

    def write(self, record: dict[str, Any]) -> None:
        now = time.process_time()
        if "eval/mean_reward" in record:
            self.judging += now - self._last  # since the record before it, of the same step
        self._last = now
        self.rows.append([record["step"], record["updates"], now - self.judging, record.get("eval/mean_reward")])

    _last = 0.0


def train(what: str, value: int, seed: int, steps: int) -> dict[str, Any]:
    watch = Watch()
    with tempfile.TemporaryDirectory() as root:
        qfleet.train("catch", [f"{KEYS[what]}={value}", *COMMON, f"total_steps={steps}", f"seed={seed}",
                               f"run.root={root}"], sinks=[watch])
    learning = [row for row in watch.rows if row[1] and row[3] is None]
    first, last = learning[0], learning[-1]
    cpu = last[2] - first[2]
    reached = next((row for row in watch.rows if row[3] is not None and row[3] >= GOAL), None)
    scores = [[row[0], row[1], row[3]] for row in watch.rows if row[3] is not None]
    return {"seed": seed, "steps_per_cpu_s": round((last[0] - first[0]) / cpu, 1),
            "updates_per_cpu_s": round((last[1] - first[1]) / cpu, 1), "updates": last[1],
            "reached": [*reached[:2], round(reached[2] - watch.rows[0][2], 2)] if reached else None, "scores": scores}


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The medians of the seeds of one value; of those that learnt it, when they had."""
    reached = [run["reached"] for run in runs if run["reached"]]
    found: dict[str, Any] = {key: statistics.median(run[key] for run in runs)
                             for key in ("steps_per_cpu_s", "updates_per_cpu_s", "updates")}
    found |= {"solved": f"{len(reached)} of {len(runs)}",
              "best": max(score for run in runs for _, _, score in run["scores"])}
    if reached:
        found |= dict(zip(("steps_to", "updates_to", "cpu_s_to"), map(statistics.median, zip(*reached, strict=True)),
                          strict=True))
    return found


def draw(document: dict[str, Any]) -> Any:
    """Steps and CPU time until it is learnt, and the speed, by the value: a matplotlib Figure."""
    from matplotlib.figure import Figure

    what, figure = document["what"], Figure(figsize=(11, 3.6), layout="constrained")
    found = {int(value): summary(runs) for value, runs in document["rows"].items()}
    speed = "steps_per_cpu_s" if what == "lanes" else "updates_per_cpu_s"
    panels = {"steps_to": "steps until learnt", "cpu_s_to": "CPU seconds until learnt", speed: speed.replace("_", " ")}
    for axis, (key, title) in zip(figure.subplots(1, 3), panels.items(), strict=True):
        points = [(value, row[key]) for value, row in found.items() if key in row]
        axis.plot(*zip(*points, strict=True), "o-", color="#0072B2")
        axis.set_xscale("log", base=2)
        axis.set_xticks(list(found), [str(value) for value in found])
        axis.set(xlabel=KEYS[what], title=title, ylim=(0, None))
        axis.grid(alpha=0.3)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=list(KEYS))
    parser.add_argument("--values", type=int, nargs="+")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12_000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    out = args.out or Path(f"benchmarks/results/sweep_{args.what}.json")
    rows = json.loads(out.read_text())["rows"] if out.exists() else {}
    for seed in range(1, args.seeds + 1):
        for value in args.values or VALUES[args.what]:
            runs = rows.setdefault(str(value), [])
            if all(run["seed"] != seed for run in runs):
                runs.append(train(args.what, value, seed, args.steps))
                ordered = dict(sorted(rows.items(), key=lambda row: int(row[0])))
                document = {"what": args.what, "steps": args.steps, "goal": GOAL, "rows": ordered}
                out.write_text(json.dumps(document | {"machine": describe_machine()}) + "\n")
                print(args.what, value, {key: runs[-1][key] for key in runs[-1] if key != "scores"}, flush=True)


if __name__ == "__main__":
    main()
