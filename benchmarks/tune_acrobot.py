"""A study of 20 trials on Acrobot-v1, then its best settings against the default recipe at equal steps.

    python benchmarks/tune_acrobot.py [--root DIR] [--trials 20] [--seeds-per-trial 2] [--jobs 1] [--part study]
        [--out benchmarks/results/tune_acrobot.json]

The default is the recipe that qfleet chooses for the environment, `vector`. Both then train on seeds that no trial has
seen, for as many steps as a trial. `score` is that of a trial, the mean of the last three evaluations; `latest` and
`best` are 100 greedy episodes of the last policy, and of the one with the best evaluation. An episode that never
reaches the goal returns -500. Call it again to continue: the study is resumed, and finished seeds are not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from speed import describe_machine

import qfleet

ENV, STEPS, EPISODES = "Acrobot-v1", 30_000, 100
SEEDS = range(101, 104)
SPACE = {"learner.learning_rate": "1e-4..1e-2:log", "learner.batch_size": [32, 64, 128],
         "learner.target_period_updates": "50..1000:log", "agent.n_step": "1..5",
         "replay.samples_per_insert": [8, 16], "explore.steps": "3000..20000:log"}
SHARED = [f"total_steps={STEPS}", "eval.episodes=5", "run.threads=1", "run.tensorboard=false"]


def study(root: Path, trials: int, seeds: int, jobs: int) -> qfleet.TuneResult:
    place = root / "study"
    if (place / "study.yaml").exists():
        return qfleet.tune(study=place, resume=True, trials=trials, jobs=jobs, progress=True)
    return qfleet.tune(ENV, SHARED, space=SPACE, trials=trials, jobs=jobs, seeds_per_trial=seeds, study=place,
                       progress=True)


def trained(name: str, source: str, root: Path, jobs: int) -> list[dict[str, Any]]:
    """Train all seeds, or what is left of them, and evaluate their last and their best policies."""
    runs = [root / "seeds" / f"{name}-s{seed}" for seed in SEEDS]
    commands = [training(run, source, seed) for run, seed in zip(runs, SEEDS, strict=True)]
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(partial(subprocess.run, check=True), commands))
    return [outcome(name, run, seed) for run, seed in zip(runs, SEEDS, strict=True)]


def training(run: Path, source: str, seed: int) -> list[str]:
    """Command that trains a run, or resumes it, which does nothing if it has ended."""
    python = [sys.executable, "-m", "qfleet"]
    if run.exists():
        return [*python, "resume", str(run)]
    return [*python, "train", source, *SHARED, f"eval.period_steps={STEPS // 10}", "stop_at=null",
            "checkpoint.replay=false", f"run.root={run.parent}", f"run.name={run.name}", f"seed={seed}"]


def outcome(name: str, run: Path, seed: int) -> dict[str, Any]:
    """Score of a run as in a trial, and mean returns of its last and its best policy."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    curve = [[record["step"], record["eval/mean_reward"]] for record in records if "eval/mean_reward" in record]
    latest, best = (qfleet.evaluate(run, episodes=EPISODES, which=which).mean_reward for which in ("latest", "best"))
    return {"settings": name, "seed": seed, "steps": records[-1]["step"], "curve": curve,
            "score": statistics.fmean(value for _, value in curve[-3:]), "latest": latest, "best": best}


def document(result: qfleet.TuneResult, seeds: int, runs: list[dict[str, Any]]) -> dict[str, Any]:
    trials = [{"number": trial.number, "state": trial.state, "score": trial.score, "steps": trial.steps,
               "seconds": trial.seconds, "evaluations": trial.evaluations, "settings": trial.settings}
              for trial in result.trials]
    summary = {name: {key: spread([run[key] for run in runs if run["settings"] == name])
                      for key in ("score", "latest", "best")} for name in ("default", "tuned")}
    return {"env": ENV, "steps": STEPS, "space": SPACE, "shared": SHARED,
            "seeds_per_trial": seeds, "trials": trials,
            "best": None if result.best is None else result.best.number, "runs": runs,
            "summary": summary, "machine": describe_machine()}


def spread(values: list[float]) -> dict[str, float]:
    return {"mean": statistics.fmean(values), "min": min(values), "max": max(values)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(tempfile.gettempdir(), "qfleet-tune-acrobot"))
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seeds-per-trial", type=int, default=2)
    parser.add_argument("--part", choices=("study",), help="do only this part")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/tune_acrobot.json"))
    args = parser.parse_args()
    result = study(args.root, args.trials, args.seeds_per_trial, args.jobs)
    if args.part == "study" or result.best_recipe is None or result.reason != "trials":
        return
    sources = {"default": ENV, "tuned": str(result.best_recipe)}
    runs = [run for name, source in sources.items() for run in trained(name, source, args.root, args.jobs)]
    found = document(result, args.seeds_per_trial, runs)
    args.out.write_text(json.dumps(found) + "\n")
    for name, scores in found["summary"].items():
        print(name, {key: f"{value['mean']:.1f} (min {value['min']:.1f})" for key, value in scores.items()})


if __name__ == "__main__":
    main()
