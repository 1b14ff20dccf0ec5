"""What Ray costs: the same roles as Ray actors and as local processes, on the same cores, in turns.

    python benchmarks/ray_speed.py [--rounds 3] [--only cartpole] [--out benchmarks/results/ray_speed.json]

A learner, two actors and an evaluator. CartPole with 2 x 256 units, where calls are many and small; Pong with the
Nature CNN, where chunks are compressed pictures and weights take megabytes. Environment steps per second after warm-up;
a `ratio` of 1 says that Ray costs nothing, and 0.9 is the least that is allowed.
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

COMMON = ["actors=2", "stop_at=null", "eval.period_steps=null", "checkpoint.period_steps=null", "eval.episodes=1",
          "run.tensorboard=false", "run.threads=1"]
WORK = {"cartpole": ["cartpole", "env.lanes=4", "run.log_period_steps=500", "total_steps=20000"],
        "pong": ["pong", "env.lanes=4", "env.threads=1", "env.max_episode_steps=200", "replay.min_steps=1000",
                 "replay.capacity=10000", "run.log_period_steps=200", "total_steps=6000"]}
PLACES = {"processes": "launcher=local", "ray": "launcher=ray"}


def round_of(name: str, number: int) -> dict[str, float]:
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for place in PLACES if number % 2 else reversed(list(PLACES)):  # neither is always the second
            subprocess.run([sys.executable, "-m", "qfleet", "train", *WORK[name], *COMMON, PLACES[place],
                            f"run.root={folder}", f"run.name={place}", "--quiet"], check=True,
                           stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
            found[place] = run_throughput(Path(folder) / place, "step")
    return found | {"ratio": found["ray"] / found["processes"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=list(WORK), choices=list(WORK))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = {name: [round_of(name, number) for number in range(args.rounds)] for name in args.only}
    medians = {name: {key: statistics.median(each[key] for each in rounds) for key in (*PLACES, "ratio")}
               for name, rounds in found.items()}
    print(json.dumps(medians, indent=2))
    if args.out:
        document = {"median": medians, "rounds": found, "machine": describe_machine()}
        args.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
