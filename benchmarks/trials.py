"""Long runs side by side, which stop when the time is up and go on with the next call: what such benchmarks share."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from precision import PREEMPTED, interrupt
from speed import describe_machine

from qfleet import __version__

REFRESH_S = 30.0
SOUND = (0, PREEMPTED, -signal.SIGTERM)
"""Exit codes of runs that are done, or were stopped by us: with a checkpoint, or before they could write one."""


@dataclass(frozen=True)
class Trial:
    """One run: its name among the others, a recipe, and what is set over it."""

    name: str
    recipe: str
    words: tuple[str, ...]

    def directory(self, root: Path) -> Path:
        return root / re.sub("[=,]", "", self.name).replace(" ", "-").replace("/", "-")

    def command(self, root: Path, limits: list[str], args: argparse.Namespace) -> list[str]:
        """Begin, or go on where a checkpoint is: with other limits, but with the settings of the beginning."""
        call, place = [sys.executable, "-m", "qfleet"], self.directory(root)
        if any(place.glob("checkpoints/step-*")):
            return [*call, "resume", str(place), *limits, "--quiet"]
        emulators = [f"env.threads={args.threads}"] if self.recipe != "vector" else []
        return [*call, "train", self.recipe, *self.words, *limits, *emulators, f"run.root={root}",
                f"run.name={place.name}", *args.overrides, "--quiet"]

    def records(self, root: Path) -> list[dict[str, Any]]:
        return records_of(self.directory(root) / "metrics.jsonl")

    def log(self, root: Path) -> Path:
        return self.directory(root).with_suffix(".log")


def options(doc: str | None, runs: str, out: str, steps: int) -> argparse.ArgumentParser:
    """The command line that they have in common."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="over the settings; for runs that begin")
    parser.add_argument("--steps", type=int, default=steps, help="decisions at which a run ends")
    parser.add_argument("--seconds", type=float, help="stop after so long, resumably")
    parser.add_argument("--games", type=int, default=30, help="that the best policy plays in the end; 0 = none")
    parser.add_argument("--threads", type=int, default=4, help="of the emulators, and of torch on a CPU, per run")
    parser.add_argument("--runs", type=Path, default=Path(runs), help="folder of the runs")
    parser.add_argument("--out", type=Path, default=Path(out))
    return parser


def run(trials: list[Trial], args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Train all, judge them and write OUT, which is kept up to date meanwhile; the rows of those that are sound."""
    before = json.loads(args.out.read_text()).get("rows", {}) if args.out.exists() else {}

    def save(some: list[Trial], games: int) -> dict[str, dict[str, Any]]:
        with ThreadPoolExecutor() as pool:
            found = dict(zip((trial.name for trial in some), pool.map(lambda trial: row(trial, args.runs, games), some),
                             strict=True))
        here = describe_machine()
        rows = before | {name: one | {key: here[key] for key in ("date", "commit")} | {"version": __version__}
                         for name, one in found.items()}
        document = {"rows": rows, "games": args.games, "overrides": args.overrides, "machine": here}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(document, indent=1) + "\n")
        return found

    codes = train(trials, args, lambda: save(trials, 0))
    for trial in trials:
        if codes[trial.name] not in SOUND:
            print(f"{trial.name} failed:\n{trial.log(args.runs).read_text()[-2000:]}", file=sys.stderr)
    return save([trial for trial in trials if codes[trial.name] in SOUND], args.games)


def train(trials: list[Trial], args: argparse.Namespace, save: Callable[[], Any]) -> dict[str, int]:
    """Run all at once until they are done or out of time, saving what is known meanwhile; their exit codes."""
    signal.signal(signal.SIGTERM, interrupt)
    args.runs.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + args.seconds if args.seconds else float("inf")
    limits = [f"total_steps={args.steps}"]
    environment, saved = os.environ | {"OMP_NUM_THREADS": str(args.threads)}, time.monotonic()
    children: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for trial in trials:
            with trial.log(args.runs).open("ab") as log:
                children[trial.name] = subprocess.Popen(trial.command(args.runs, limits, args), stdout=log, stderr=log,
                                                        env=environment)
        while time.monotonic() < deadline and any(child.poll() is None for child in children.values()):
            time.sleep(0.5)
            if time.monotonic() - saved > REFRESH_S:
                save()
                saved = time.monotonic()
    finally:
        for child in children.values():
            if child.poll() is None:
                child.send_signal(signal.SIGTERM)
        codes = {name: child.wait() for name, child in children.items()}
    return codes


def row(trial: Trial, root: Path, games: int = 0) -> dict[str, Any]:
    """What became of a run so far: its clocks, its curves over steps and over [updates, episodes], fresh games."""
    told = trial.records(root)
    last = told[-1] if told else {"step": 0, "updates": 0, "time_s": 0.0}
    judged = [r for r in told if r.get("eval/mean_reward") is not None]
    rolled = thinned([r for r in told if r.get("rollout/ep_rew_mean") is not None])
    found: dict[str, Any] = {
        "steps": last["step"], "updates": last["updates"], "episodes": last.get("episodes", 0),
        "seconds": last["time_s"], "settings": [trial.recipe, *trial.words],
        "curve": [[r["step"], r["eval/mean_reward"], r["eval/std_reward"]] for r in judged],
        "curve_clocks": [[r["updates"], r["episodes"]] for r in judged],
        "training": [[r["step"], r["rollout/ep_rew_mean"]] for r in rolled],
        "training_clocks": [[r["updates"], r["episodes"]] for r in rolled]}
    if games and judged:
        epsilon = next((word.partition("=")[2] for word in trial.words if word.startswith("eval.epsilon=")), "0")
        found["games"] = played(trial.directory(root), games, epsilon)
    return found


def played(run: Path, games: int, epsilon: str = "0", timeout_s: float | None = None) -> dict[str, Any]:
    """Whole games of a run's best policy, side by side, without the limit that evaluations may have."""
    words = ["eval", str(run), "--episodes", str(games), "--lanes", str(games), "--epsilon", epsilon, "--json"]
    done = subprocess.run([sys.executable, "-m", "qfleet", *words], capture_output=True, text=True, check=True,
                          timeout=timeout_s)
    return {key: value for key, value in json.loads(done.stdout).items() if key != "checkpoint"}


def records_of(metrics: Path) -> list[dict[str, Any]]:
    """What a run has told so far; a line that is being written does not count."""
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def thinned(points: list[Any], most: int = 300) -> list[Any]:
    """Every so-manieth of them, the last one included."""
    each = max(1, -(-len(points) // most))
    return points[::-1][::each][::-1]


def blank(width: float, height: float) -> Any:
    """A figure to draw on, in inches."""
    from matplotlib.figure import Figure  # not needed where runs are made

    return Figure(figsize=(width, height), layout="constrained")
