"""Do rainbow, iqn and btr learn Pong? Runs side by side, judged by 30 full games of the best policy of each.

    python benchmarks/pong_family.py [--only rainbow iqn btr] [--steps 3000000] [--seconds 570] [--threads 4] [k=v]

With `--seconds` the runs are stopped when the time is up, each with a checkpoint; the same command goes on with them
where `--runs` is still there. A run ends early when an evaluation reaches 19. Curves and results are written to OUT,
and added to what it holds already. Meant for a machine with a GPU (`device=auto` finds it): on two cores it takes days.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from precision import PREEMPTED, hardware, interrupt

GOAL, GAMES = 18, 30
COMMON = [
    "stop_at=19", "env.lanes=32", "actors=2", "replay.capacity=300000", "replay.min_steps=20000",
    "eval.period_steps=50000", "eval.from_return=-10", "eval.lanes=10", "eval.epsilon=0",
    "checkpoint.period_steps=100000", "checkpoint.keep=1", "checkpoint.replay=false", "run.log_period_steps=10000",
    "run.tensorboard=false"]
QUICK = ["learner.batch_size=256", "learner.learning_rate=2e-4", "learner.optimizer_eps=2e-5", "agent.n_step=3",
         "learner.target_period_updates=500", "learner.publish_period_updates=2", "replay.samples_per_insert=16"]
SETTINGS: dict[str, list[str]] = {
    "rainbow": [*QUICK, "replay.beta_steps=3000000"],
    "iqn": [*QUICK, "explore.steps=100000"],
    "btr": ["explore.steps=100000", "replay.beta_steps=3000000", "replay.samples_per_insert=8"],
}
"""Over the recipes, whose settings are for 200 million frames of any game: what suits an easy one and a short time."""


def directory(root: Path, recipe: str) -> Path:
    return root / recipe


def command(root: Path, recipe: str, args: argparse.Namespace) -> list[str]:
    """Begin, or go on where a checkpoint is."""
    call, place = [sys.executable, "-m", "qfleet"], directory(root, recipe)
    limits = [f"total_steps={args.steps}", f"run.threads={args.threads}"]
    if any(place.glob("checkpoints/step-*")):
        return [*call, "resume", str(place), *limits, "--quiet"]
    return [*call, "train", recipe, *COMMON, *SETTINGS[recipe], *limits, f"env.threads={args.threads}",
            f"run.root={root}", f"run.name={recipe}", *args.overrides, "--quiet"]


def records(place: Path) -> list[dict[str, Any]]:
    path = place / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def train(root: Path, args: argparse.Namespace) -> dict[str, int]:
    """Run all, until done or out of time; their exit codes."""
    root.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + args.seconds if args.seconds else float("inf")
    environment = os.environ | {"OMP_NUM_THREADS": str(args.threads)}
    children = {}
    try:
        for recipe in args.only:
            with (root / f"{recipe}.log").open("ab") as log:
                children[recipe] = subprocess.Popen(command(root, recipe, args), stdout=log, stderr=log,
                                                    env=environment)
        while time.monotonic() < deadline and any(child.poll() is None for child in children.values()):
            time.sleep(0.5)
    finally:
        for child in children.values():
            if child.poll() is None:
                child.send_signal(signal.SIGTERM)
        codes = {recipe: child.wait() for recipe, child in children.items()}
    return codes


def row(root: Path, recipe: str, games: int) -> dict[str, Any]:
    """What became of a run: its curve, and fresh games of its best policy."""
    place = directory(root, recipe)
    told = records(place)
    last = told[-1] if told else {"step": 0, "updates": 0, "time_s": 0.0}
    found: dict[str, Any] = {
        "steps": last["step"], "updates": last["updates"], "seconds": last["time_s"],
        "curve": [[r["step"], r["eval/mean_reward"], r["eval/std_reward"]] for r in told if "eval/mean_reward" in r],
        "training": [[r["step"], r["rollout/ep_rew_mean"]] for r in told if "rollout/ep_rew_mean" in r]}
    if found["curve"]:
        words = ["eval", str(place), "--episodes", str(games), "--json"]
        judged = subprocess.run([sys.executable, "-m", "qfleet", *words], capture_output=True, text=True, check=True)
        found["games"] = json.loads(judged.stdout)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="over the settings; for runs that begin")
    parser.add_argument("--only", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--steps", type=int, default=3_000_000)
    parser.add_argument("--seconds", type=float, help="stop after so long, resumably")
    parser.add_argument("--games", type=int, default=GAMES)
    parser.add_argument("--threads", type=int, default=4, help="of torch and of the emulators, per run")
    parser.add_argument("--runs", type=Path, default=Path("runs/pong_family"), help="folder of the runs")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/pong_family.json"))
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, interrupt)
    codes = train(args.runs, args)
    rows = json.loads(args.out.read_text())["rows"] if args.out.exists() else {}
    sound = [recipe for recipe in args.only if codes[recipe] in (0, PREEMPTED)]
    for recipe in set(args.only) - set(sound):
        print(f"{recipe} failed:\n{(args.runs / f'{recipe}.log').read_text()[-2000:]}", file=sys.stderr)
    with ThreadPoolExecutor() as pool:
        judged = pool.map(lambda recipe: row(args.runs, recipe, args.games), sound)
    for recipe, found in zip(sound, judged, strict=True):
        rows[recipe] = found
        score = rows[recipe].get("games", {}).get("mean_reward")
        print(f"{recipe:8} {rows[recipe]['steps']:>9,} steps  {args.games} games: {score}  (aim {GOAL})", flush=True)
    document = {"rows": rows, "settings": {name: [*COMMON, *SETTINGS[name]] for name in SETTINGS}, "games": args.games,
                "overrides": args.overrides, "machine": hardware()}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if any(code not in (0, PREEMPTED) for code in codes.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
