"""Ways in which learners meet, on one recipe: curves per step, per update and per second, and how old gradients were.

    python benchmarks/scaling.py [--seeds 3] [--steps 20000] [--root /tmp/scaling]

What lanes and batches bring is in sweep.py.

CartPole alone, with 2 ranks that average, with 3 learners and 2 shards of a parameter server (Gorila), and the same
with delay compensation (DC-ASGD). All evaluate every 1,000 steps and none stops early; the ages of gradients are the
histogram of server/staleness_*. `make figures` draws OUT into docs/assets.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from speed import describe_machine

SERVER = ["sync=server", "learners=3", "parameter_server.shards=2"]
WAYS = {"alone": [],
        "ranks": ["sync=allreduce", "learners=2"],
        "server": SERVER,
        "compensated": [*SERVER, "parameter_server.compensation=adaptive", "parameter_server.compensation_lambda=2"]}
COMMON = ["stop_at=null", "eval.period_steps=1000", "eval.episodes=10", "run.threads=1", "run.tensorboard=false"]


def qfleet(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "qfleet", *words], check=True, stdout=subprocess.DEVNULL,
                   env=os.environ | {"OMP_NUM_THREADS": "1"})


def summary(run: Path, goal: float) -> dict:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    scores = [(r["step"], r["updates"], r["time_s"], r["eval/mean_reward"]) for r in records if "eval/mean_reward" in r]
    first = next(((step, updates, seconds) for step, updates, seconds, score in scores if score >= goal), None)
    last = records[-1]
    ages = {tag.removeprefix("server/staleness_"): number for tag, number in last.items()
            if tag.startswith("server/staleness_")}
    return {"first_at_goal": first, "updates": last["updates"], "seconds": last["time_s"], "ages": ages,
            "scores": scores}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--root", type=Path, default=Path("/tmp/scaling"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/scaling.json"))
    args = parser.parse_args()
    found: dict[str, list[dict]] = {}
    for way, words in WAYS.items():
        for seed in range(1, args.seeds + 1):
            run = args.root / f"{way}-s{seed}"
            if not run.exists():
                qfleet("train", "cartpole", *words, *COMMON, f"total_steps={args.steps}", f"seed={seed}",
                       f"run.root={args.root}", f"run.name={run.name}", "--quiet")
            found.setdefault(way, []).append(summary(run, 475))
        reached = [each["first_at_goal"] for each in found[way] if each["first_at_goal"]]
        medians = [statistics.median(each[i] for each in reached) for i in range(3)] if reached else None
        print(way, f"{len(reached)} of {args.seeds} reach 475; median steps, updates, seconds:", medians, flush=True)
    args.out.write_text(json.dumps({"ways": found, "machine": describe_machine()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
