"""The learning matrix: recipes and their variants over seeds, reported as k of n solved.

    python benchmarks/learn.py [--seeds 5] [--only cartpole] [--out benchmarks/results/learn.json]

A run counts as solved when the mean of 20 fresh greedy episodes of its best policy, played after training, reaches the
threshold within the recipe's step budget. Rows are saved as they come; runs already in OUT are not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from side_by_side import machine

import qfleet

MATRIX: dict[str, tuple[str, float, list[str]]] = {
    "cartpole": ("cartpole", 475, []),
    "cartpole one-step": ("cartpole", 475, ["agent.n_step=1", "learner.learning_rate=5e-4"]),
    "cartpole single": ("cartpole", 475, ["agent.double=false"]),
    "cartpole dueling": ("cartpole", 475, ["agent.dueling=true"]),
    "cartpole prioritised": ("cartpole", 475, ["replay.alpha=0.6", "replay.beta_steps=50000"]),
    "cartpole ladder": ("cartpole", 475, ["explore.kind=ladder", "explore.warmup_steps=5000"]),
    "cartpole hard target": ("cartpole", 475, ["learner.target_period_updates=250", "learner.learning_rate=5e-4"]),
    "cartpole mse": ("cartpole", 475, ["agent.loss=mse"]),
    "cartpole rescaled": ("cartpole", 475, ["agent.rescale=true"]),
    "cartpole layer norm": ("cartpole", 475, ["agent.norm=layer"]),
    "cartpole rmsprop": ("cartpole", 475, ["learner.optimizer=rmsprop", "learner.optimizer_eps=1e-2"]),
    "catch": ("catch", 0.95, []),
    "catch pixels": ("catch", 0.95, ["env.kwargs={pixels: true, side: 12}", "learner.precision=fp32"]),
    "catch pixels bf16": ("catch", 0.95, ["env.kwargs={pixels: true, side: 12}", "learner.precision=bf16"]),
}


def train(recipe: str, overrides: list[str], seed: int) -> dict:
    with tempfile.TemporaryDirectory() as root:
        result = qfleet.train(recipe, [*overrides, f"seed={seed}", f"run.root={root}", "run.tensorboard=false"])
        score = qfleet.evaluate(result.directory, episodes=20, seed=10_000 + seed)
    return {"seed": seed, "steps": result.steps, "updates": result.updates, "seconds": round(result.seconds, 1),
            "reason": result.reason, "mean_reward": score.mean_reward, "std_reward": score.std_reward}


def report(rows: dict[str, list[dict]]) -> str:
    lines = []
    for name, runs in rows.items():
        goal = MATRIX[name][1]
        solved = [run["steps"] for run in runs if run["mean_reward"] >= goal]
        median = f"{statistics.median(solved):,.0f}" if solved else "-"
        lines.append(f"{name:24} {len(solved)} of {len(runs)} reach {goal:g}, median steps {median}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=list(MATRIX), choices=list(MATRIX))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/learn.json"))
    args = parser.parse_args()
    saved = json.loads(args.out.read_text())["rows"] if args.out.exists() else {}
    rows: dict[str, list[dict]] = {name: saved.get(name, []) for name in MATRIX if name in saved or name in args.only}
    for name in args.only:
        recipe, _, overrides = MATRIX[name]
        for seed in range(1, args.seeds + 1):
            if any(run["seed"] == seed for run in rows[name]):
                continue
            rows[name].append(train(recipe, overrides, seed))
            print(name, rows[name][-1], flush=True)
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps({"rows": rows, "machine": machine()}, indent=1) + "\n")
    print(report({name: rows[name] for name in args.only}))


if __name__ == "__main__":
    main()
