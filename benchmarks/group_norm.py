"""Does GroupNorm make learning curves more alike? Pixel Catch with the Nature CNN, with and without, over seeds.

    python benchmarks/group_norm.py [--seeds 5] [--steps 6000] [--out benchmarks/results/group_norm.json]

Every combination of norm {none, group} and learning rate {1e-4, 1e-3} is trained with the same seeds. The figures are
the mean of each curve (its area) and how far the seeds lie apart (standard deviation of that area over seeds, and the
mean over time of the standard deviation across seeds). Writes OUT; `make figures` draws it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

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


def draw(document: dict[str, Any]) -> Any:
    """The curves as a matplotlib Figure."""
    from matplotlib.figure import Figure

    results, figure = document["curves"], Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots(1, len(RATES), sharey=True)
    colours = dict(zip(NORMS, ("tab:orange", "tab:blue"), strict=True))
    for axis, rate in zip(axes, RATES, strict=True):
        for norm in NORMS:
            curves = results[f"{norm} {rate:g}"]
            x = [PERIOD * (i + 1) for i in range(len(curves[0]))]
            for curve in curves:
                axis.plot(x, curve, color=colours[norm], alpha=0.25, linewidth=1)
            mean = [statistics.fmean(values) for values in zip(*curves, strict=True)]
            axis.plot(x, mean, color=colours[norm], linewidth=2.5, label=f"norm={norm}, mean of {len(curves)} seeds")
        axis.set(title=f"learning rate {rate:g}", xlabel="environment steps")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("return of 40 greedy episodes")
    axes[0].legend(loc="lower right")
    figure.suptitle("Pixel Catch, Nature CNN: single seeds faint, means bold")
    return figure


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
