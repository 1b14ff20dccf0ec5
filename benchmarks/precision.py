"""Does bfloat16 learn what float32 learns? Pong over seeds in both precisions, all runs side by side.

    python benchmarks/precision.py [--seeds 3] [--steps 1000000] [--seconds 570] [--threads 2] [key=value ...]
    python benchmarks/precision.py --report [--out benchmarks/results/precision.json]

With `--seconds` the runs are stopped when the time is up, each with a checkpoint; the same command goes on with them.
Precisions are compared at the last step at which every run was evaluated. `--report` trains nothing: it prints the
table of what OUT holds.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from speed import describe_machine

PRECISIONS = ("fp32", "bf16")
LEVELS = (0.0, 15.0, 18.0)
PREEMPTED = 75
"""Exit code of a run that was told to stop and has saved its state."""

RECIPE = [
    "env.lanes=32", "agent.n_step=3", "agent.dueling=true", "explore.steps=50000", "learner.batch_size=64",
    "learner.learning_rate=2.5e-4", "learner.publish_period_updates=1", "eval.period_steps=100000", "eval.lanes=10",
    "stop_at=null", "checkpoint.period_steps=200000", "checkpoint.keep=1", "run.tensorboard=false",
]
"""Over the recipe `pong`: what learns it in fewer steps and updates. Nobody stops early, so curves are equally long."""

Curve = list[list[float]]
"""[step, mean, std] of every evaluation."""


@dataclass(frozen=True)
class Trial:
    """One run: a precision and a seed, and where it is kept."""

    precision: str
    seed: int
    root: Path

    @property
    def directory(self) -> Path:
        return self.root / f"{self.precision}-{self.seed}"

    @property
    def log(self) -> Path:
        return self.directory.with_suffix(".log")

    def records(self) -> list[dict[str, Any]]:
        path = self.directory / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def curve(self) -> Curve:
        return [[r["step"], r["eval/mean_reward"], r["eval/std_reward"]]
                for r in self.records() if "eval/mean_reward" in r]

    def done(self, steps: int) -> bool:
        """Whether the run has come so far and was judged there."""
        curve = self.curve()
        return bool(curve) and curve[-1][0] >= steps

    def command(self, steps: int, threads: int, overrides: list[str]) -> list[str]:
        """Begin, or go on where a checkpoint is."""
        call = [sys.executable, "-m", "qfleet"]
        if any(self.directory.glob("checkpoints/step-*")):
            return [*call, "resume", str(self.directory), f"total_steps={steps}", f"run.threads={threads}", "--quiet"]
        return [*call, "train", "pong", *RECIPE, f"env.threads={threads}", f"run.threads={threads}",
                f"total_steps={steps}", f"learner.precision={self.precision}", f"seed={self.seed}",
                f"run.root={self.root}", f"run.name={self.directory.name}", *overrides, "--quiet"]


def run_all(trials: list[Trial], args: argparse.Namespace) -> list[str]:
    """Run what is not done, all at once, until done or out of time; returns the names of those that failed."""
    environment = os.environ | {"OMP_NUM_THREADS": str(args.threads)}
    children: dict[Trial, subprocess.Popen[bytes]] = {}
    deadline = time.monotonic() + args.seconds if args.seconds else float("inf")
    try:
        for trial in trials:
            if not trial.done(args.steps):
                trial.root.mkdir(parents=True, exist_ok=True)
                with trial.log.open("ab") as log:
                    children[trial] = subprocess.Popen(trial.command(args.steps, args.threads, args.overrides),
                                                       stdout=log, stderr=log, env=environment)
        while time.monotonic() < deadline and any(child.poll() is None for child in children.values()):
            time.sleep(0.5)
    finally:
        for child in children.values():
            if child.poll() is None:
                child.send_signal(signal.SIGTERM)
        codes = {trial: child.wait() for trial, child in children.items()}
    failed = [trial for trial, code in codes.items() if code not in (0, PREEMPTED)]
    for trial in failed:
        print(f"{trial.directory.name} failed:\n{trial.log.read_text()[-2000:]}", file=sys.stderr)
    return [trial.directory.name for trial in failed]


def row(trial: Trial) -> dict[str, Any]:
    """What became of one run so far."""
    records, curve = trial.records(), trial.curve()
    last = records[-1] if records else {"step": 0, "updates": 0, "time_s": 0.0}
    means = [mean for _, mean, _ in curve]
    return {"seed": trial.seed, "steps": last["step"], "updates": last["updates"], "seconds": last["time_s"],
            "steps_per_s": round(last["step"] / max(last["time_s"], 1e-9), 1), "evaluations": curve,
            "final": means[-1] if means else None, "best": max(means, default=None),
            "first_step_at": {f"{level:g}": next((step for step, mean, _ in curve if mean >= level), None)
                              for level in LEVELS}}


def summary(rows: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Both precisions at the last evaluation that all runs share; `std` is that over seeds."""
    shared = min(len(run["evaluations"]) for runs in rows.values() for run in runs)
    if shared == 0:
        return {"evaluations_shared": 0}
    found: dict[str, Any] = {"evaluations_shared": shared}
    for precision, runs in rows.items():
        curves = [[mean for _, mean, _ in run["evaluations"][:shared]] for run in runs]
        found[precision] = {
            "step": round(statistics.fmean(run["evaluations"][shared - 1][0] for run in runs)),
            "last": spread([curve[-1] for curve in curves]), "best": spread([max(curve) for curve in curves]),
            "area": spread([statistics.fmean(curve) for curve in curves]),
            "steps_per_s": spread([run["steps_per_s"] for run in runs])}
    one, other = (found[precision] for precision in PRECISIONS)
    seeds = len(rows[PRECISIONS[0]])
    found["bf16 - fp32"] = {
        key: {"mean": other[key]["mean"] - one[key]["mean"],
              "standard_error": ((one[key]["std"]**2 + other[key]["std"]**2) / seeds)**0.5}
        for key in ("last", "best", "area")}
    return found


def spread(values: list[float]) -> dict[str, float]:
    return {"mean": statistics.fmean(values), "std": statistics.stdev(values) if len(values) > 1 else 0.0}


def table(document: dict[str, Any]) -> str:
    lines = [f"{'precision':9} {'seed':>4} {'steps':>9} {'steps/s':>8} {'final':>6} {'best':>6}  first step at "
             + ", ".join(f"{level:g}" for level in LEVELS)]
    for precision, runs in document["rows"].items():
        for run in runs:
            final, best = (f"{run[key]:6.1f}" if run[key] is not None else f"{'-':>6}" for key in ("final", "best"))
            levels = ", ".join(f"{step:,}" if step else "-" for step in run["first_step_at"].values())
            lines.append(f"{precision:9} {run['seed']:4} {run['steps']:9,} {run['steps_per_s']:8.0f} {final} {best}  "
                         f"{levels}")
    found = document["summary"]
    for precision in PRECISIONS if found["evaluations_shared"] else ():
        part = found[precision]
        figures = [f"{key} {part[key]['mean']:.1f} ± {part[key]['std']:.1f}" for key in part if key != "step"]
        lines.append(f"{precision} at {part['step']:,}: " + ", ".join(figures))
    for key, gap in found.get("bf16 - fp32", {}).items():
        lines.append(f"bf16 - fp32, {key}: {gap['mean']:+.1f}, standard error {gap['standard_error']:.1f}")
    return "\n".join(lines)


def interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="over the recipe; for runs that begin")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, help="stop after so long, resumably")
    parser.add_argument("--threads", type=int, default=2, help="of torch and of the emulators, per run")
    parser.add_argument("--runs", type=Path, default=Path("runs/precision"), help="folder of the runs")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/precision.json"))
    parser.add_argument("--report", action="store_true", help="print what OUT holds")
    args = parser.parse_args()
    if args.report:
        document = json.loads(args.out.read_text())
        print(table(document))
        return 0
    signal.signal(signal.SIGTERM, interrupt)
    trials = [Trial(precision, seed, args.runs) for seed in range(1, args.seeds + 1) for precision in PRECISIONS]
    failed = run_all(trials, args)
    rows = {precision: [row(trial) for trial in trials if trial.precision == precision] for precision in PRECISIONS}
    document = {"rows": rows, "summary": summary(rows), "overrides": [*RECIPE, *args.overrides], "failed": failed,
                "threads": args.threads, "machine": describe_machine()}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(document, indent=1) + "\n")
    print(table(document))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
