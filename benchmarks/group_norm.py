"""Does GroupNorm make learning curves more alike? Pixel Catch with the Nature CNN, with and without, over seeds.

    python benchmarks/group_norm.py [--seeds 5] [--steps 6000] [--out benchmarks/results/group_norm.json]

Every combination of norm {none, group} and learning rate {1e-4, 1e-3} is trained with the same seeds. The figures are
the mean of each curve (its area) and how far the seeds lie apart (standard deviation of that area over seeds, and the
mean over time of the standard deviation across seeds). Writes OUT.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from sinks import Evaluations
from speed import describe_machine

import qfleet

NORMS, RATES, PERIOD = ("none", "group"), (1e-4, 1e-3), 500


def train(norm: str, rate: float, seed: int, steps: int) -> list[float]:
    curve = Evaluations()
    with tempfile.TemporaryDirectory() as root:
        qfleet.train("catch", [
            "env.kwargs={pixels: true, side: 40}", "agent.torso=nature", "agent.hidden=[128]", f"agent.norm={norm}",
            f"learner.learning_rate={rate}", "learner.precision=fp32", "learner.batch_size=32", "run.threads=1",
            "replay.samples_per_insert=4", "replay.min_steps=500", "explore.steps=2000", f"eval.period_steps={PERIOD}",
            "eval.episodes=40", "eval.lanes=8", "stop_at=null", f"total_steps={steps}", f"seed={seed}",
            "checkpoint.period_steps=null", "checkpoint.replay=false", "run.tensorboard=false", f"run.root={root}",
        ], sinks=[curve])
    return [value for _, value in curve.curve[:steps // PERIOD]]


def summary(curves: list[list[float]]) -> dict[str, float]:
    areas = [statistics.fmean(curve) for curve in curves]
    across = [statistics.pstdev(values) for values in zip(*curves, strict=True)]
    return {"area_mean": statistics.fmean(areas), "area_std_over_seeds": statistics.pstdev(areas),
            "std_across_seeds": statistics.fmean(across), "final_mean": statistics.fmean(c[-1] for c in curves),
            "final_worst": min(c[-1] for c in curves)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/group_norm.json"))
    args = parser.parse_args()
    results: dict[str, list[list[float]]] = {}
    for rate in RATES:
        for norm in NORMS:
            name = f"{norm} {rate:g}"
            results[name] = [train(norm, rate, seed, args.steps) for seed in range(1, args.seeds + 1)]
            print(name, json.dumps(summary(results[name])), flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    document = {"summary": {name: summary(curves) for name, curves in results.items()}, "curves": results,
                "period_steps": PERIOD, "machine": describe_machine()}
    args.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
