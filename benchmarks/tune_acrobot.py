"""A study of 20 trials on Acrobot-v1, then its best settings against the default recipe at equal steps.

    python benchmarks/tune_acrobot.py [--root DIR] [--trials 20] [--jobs 1] [--part study|seeds]
        [--out benchmarks/results/tune_acrobot.json]

The default is the recipe that qfleet chooses for the environment, `vector`. Both then train on seeds that no trial has
seen, for as many steps as a trial, and each last policy plays 100 greedy episodes. A score of -500 is an episode that
never reached the goal. Call it again to continue: the study is resumed, and finished seeds are not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from speed import describe_machine

import qfleet

ENV, STEPS, EPISODES = "Acrobot-v1", 30_000, 100
SEEDS = (101, 102, 103)
SPACE = {"learner.learning_rate": "1e-4..1e-2:log", "learner.batch_size": [32, 64, 128],
         "learner.target_period_updates": "50..1000:log", "agent.n_step": "1..5",
         "replay.samples_per_insert": [8, 16], "explore.steps": "3000..20000:log"}
SHARED = [f"total_steps={STEPS}", "eval.episodes=5", "run.threads=1", "run.tensorboard=false"]


def study(root: Path, trials: int, jobs: int) -> qfleet.TuneResult:
    place = root / "study"
    if (place / "study.yaml").exists():
        return qfleet.tune(study=place, resume=True, trials=trials, jobs=jobs, progress=True)
    return qfleet.tune(ENV, SHARED, space=SPACE, trials=trials, jobs=jobs, study=place, progress=True)


def trained(source: str, name: str, seed: int, root: Path) -> dict[str, Any]:
    """Train one seed, or take the run that is there, and evaluate its last policy."""
    run = root / "seeds" / f"{name}-s{seed}"
    if not (run / "checkpoints").exists():
        qfleet.train(source, [*SHARED, f"eval.period_steps={STEPS // 10}", "stop_at=null", f"seed={seed}",
                              f"run.root={run.parent}", f"run.name={run.name}", "checkpoint.replay=false"])
    score = qfleet.evaluate(run, episodes=EPISODES, which="latest")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    curve = [[record["step"], record["eval/mean_reward"]] for record in records if "eval/mean_reward" in record]
    return {"settings": name, "seed": seed, "steps": records[-1]["step"], "mean": score.mean_reward,
            "std": score.std_reward, "curve": curve}


def document(result: qfleet.TuneResult, runs: list[dict[str, Any]]) -> dict[str, Any]:
    trials = [{"number": trial.number, "state": trial.state, "score": trial.score, "steps": trial.steps,
               "evaluations": trial.evaluations, "settings": trial.settings} for trial in result.trials]
    means = {name: [run["mean"] for run in runs if run["settings"] == name] for name in ("default", "best")}
    return {"env": ENV, "steps": STEPS, "space": SPACE, "shared": SHARED, "trials": trials,
            "best": None if result.best is None else result.best.number, "runs": runs,
            "summary": {name: {"mean": statistics.fmean(found), "min": min(found), "seeds": len(found)}
                        for name, found in means.items() if found}, "machine": describe_machine()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(tempfile.gettempdir(), "qfleet-tune-acrobot"))
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--part", choices=("study", "seeds"), help="do only this part")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/tune_acrobot.json"))
    args = parser.parse_args()
    result = study(args.root, args.trials, args.jobs)
    if args.part == "study" or result.best_recipe is None or result.reason != "trials":
        return
    runs = [trained(source, name, seed, args.root) for seed in SEEDS
            for name, source in (("default", ENV), ("best", str(result.best_recipe)))]
    args.out.write_text(json.dumps(document(result, runs)) + "\n")
    for name, found in document(result, runs)["summary"].items():
        print(f"{name}: mean {found['mean']:.1f}, min {found['min']:.1f} of {found['seeds']} seeds")


if __name__ == "__main__":
    main()
