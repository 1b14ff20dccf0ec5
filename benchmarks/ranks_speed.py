"""What meeting costs: two ranks that average their gradients against two learners that never meet, one core each.

    taskset -c 0,1 python benchmarks/ranks_speed.py [--rounds 3] [--out benchmarks/results/ranks_speed.json]

Each rank acts, stores and updates as often as each of the lone learners does beside it, with one thread; what remains
of their rate is the efficiency, 1 being ideal. CartPole with 2 x 256 units and Pong with the Nature CNN, batches of 64
and 32 per rank; Pong also with gradients sent while backward runs. Updates per second after warm-up, no evaluations.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from speed import describe_machine, run_throughput

COMMON = ["stop_at=null", "eval.period_steps=null", "checkpoint.period_steps=null", "run.tensorboard=false",
          "run.threads=1", "eval.episodes=1"]
RANKS = ["sync=allreduce", "learners=2", "allreduce.batch=per_rank"]
PONG = ["pong", "replay.min_steps=1000", "replay.capacity=10000", "run.log_period_steps=200",
        "env.max_episode_steps=100", "env.threads=1"]
WORK = {"cartpole": (["cartpole", "run.log_period_steps=500"], 12_000, []),
        "pong": (PONG, 4_000, []),
        "pong, overlapped": (PONG, 4_000, ["allreduce.overlap=true"])}


def launch(root: Path, name: str, words: list[str]) -> subprocess.Popen:
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", "qfleet", "train", *words, *COMMON, f"run.root={root}",
                             f"run.name={name}", "--quiet"], env=env, stdout=subprocess.DEVNULL)


def round_of(name: str) -> dict[str, float]:
    words, steps, more = WORK[name]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        lone = [launch(root, f"lone{seed}", [*words, f"total_steps={steps}", f"seed={seed}"]) for seed in (1, 2)]
        codes = [process.wait() for process in lone]
        codes.append(launch(root, "ranks", [*words, *RANKS, *more, f"total_steps={2 * steps}"]).wait())
        if any(codes):
            raise SystemExit(f"a run failed: {codes}")
        alone = statistics.mean(run_throughput(root / f"lone{seed}", "updates") for seed in (1, 2))
        together = run_throughput(root / "ranks", "updates")
    return {"alone": alone, "ranks": together, "efficiency": together / alone}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=list(WORK), choices=list(WORK))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = {name: [round_of(name) for _ in range(args.rounds)] for name in args.only}
    medians = {name: {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
               for name, rounds in found.items()}
    print(json.dumps(medians, indent=2))
    if args.out:
        document = {"median": medians, "rounds": found, "machine": describe_machine()}
        args.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
