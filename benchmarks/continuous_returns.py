"""What TD3 and DDPG return after equal steps: ours and Stable-Baselines3's on MuJoCo, seed by seed.

    python benchmarks/continuous_returns.py [--env HalfCheetah-v5] [--seeds 1 2 3] [--steps 100000] [--jobs 1]
        [--only qfleet_td3 stable_baselines3_td3 ...] [--device cpu] [--limit-s S]
        [--out benchmarks/results/continuous_returns.json] [key=value ...]

SB3's side has the hyper-parameters of rl-zoo3 for MuJoCo: 400 and 300 units, batch 256, rate 1e-3, an update after
every step, 10,000 random steps, noise 0.1. Ours is the environment's recipe, with one lane, too, and as many updates of
as many items; DDPG is the same without TD3's fixes. `key=value` changes it. A return is the mean of 10 greedy episodes
of the last policy, and every EVAL_STEPS steps of the one of that time. Every run has a process and a thread of its own.
Runs are saved as they come; those already in OUT are not repeated. At the time limit, unfinished runs end and are saved
with the evaluations that they have. Needs `pip install stable-baselines3` and the extra mujoco. `make figures` draws
them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sinks import Evaluations
from speed import describe_machine
from trials import blank

from qfleet.report.plots import COLOURS

EVAL_STEPS = 10_000
EPISODES = 10
RECIPES = {"HalfCheetah-v5": "halfcheetah", "Hopper-v5": "hopper", "Walker2d-v5": "walker2d"}
PLAIN = ["agent.twin=false", "agent.smoothing=0", "agent.policy_delay=1", "learner.target_tau=0.005"]
THREADS = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}

Row = dict[str, Any]
Curve = list[tuple[int, float]]
"""Steps of training, and what the policy of that time returned."""


class PrintedEvaluations(Evaluations):
    """Also prints each evaluation as a line of JSON, which remains if the run is ended early."""

    def write(self, record: Mapping[str, Any]) -> None:
        before = len(self.curve)
        super().write(record)
        for point in self.curve[before:]:
            print(json.dumps(point), flush=True)


def ours(env: str, seed: int, steps: int, device: str, overrides: list[str]) -> Curve:
    import qfleet

    found = PrintedEvaluations()
    with tempfile.TemporaryDirectory() as root:
        qfleet.train(RECIPES[env], [
            f"total_steps={steps}", f"seed={seed}", f"eval.period_steps={EVAL_STEPS}",
            f"eval.episodes={EPISODES}", "checkpoint.period_steps=null", "checkpoint.replay=false", "run.threads=1",
            f"run.root={root}", "run.tensorboard=false", "eval.final_episodes=0", f"device={device}", *overrides],
            sinks=[found])
    return found.curve


def stable_baselines3(name: str, env: str, seed: int, steps: int, device: str) -> Curve:
    import gymnasium
    import numpy as np
    import stable_baselines3
    import torch
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.noise import NormalActionNoise

    torch.set_num_threads(1)
    curve: Curve = []
    stage = Monitor(gymnasium.make(env))
    stage.reset(seed=10_000 + seed)

    class Watch(BaseCallback):
        def _on_step(self) -> bool:
            if self.num_timesteps % EVAL_STEPS == 0 and self.num_timesteps < steps:
                self.judge()
            return True

        def judge(self) -> None:
            mean, _ = evaluate_policy(self.model, stage, n_eval_episodes=EPISODES, deterministic=True)
            curve.append((self.num_timesteps, float(mean)))
            print(json.dumps(curve[-1]), flush=True)

    played = gymnasium.make(env)
    shape = played.action_space.shape
    watch = Watch()
    model = getattr(stable_baselines3, name)(
        "MlpPolicy", played, learning_rate=1e-3, batch_size=256, learning_starts=10_000, train_freq=1, gradient_steps=1,
        action_noise=NormalActionNoise(np.zeros(shape), 0.1 * np.ones(shape)),
        policy_kwargs={"net_arch": [400, 300]}, seed=seed, device=device, verbose=0)
    model.learn(steps, callback=watch)
    watch.judge()
    return curve


CONTENDERS: dict[str, Callable[[str, int, int, str, list[str]], Curve]] = {
    "qfleet_td3": ours,
    "stable_baselines3_td3": lambda env, seed, steps, device, _: stable_baselines3("TD3", env, seed, steps, device),
    "qfleet_ddpg": lambda env, seed, steps, device, over: ours(env, seed, steps, device, [*PLAIN, *over]),
    "stable_baselines3_ddpg": lambda env, seed, steps, device, _: stable_baselines3("DDPG", env, seed, steps, device),
}


@dataclass(frozen=True)
class Run:
    """One run: a contender, an environment, a seed and settings."""

    name: str
    env: str
    seed: int
    steps: int
    device: str
    overrides: list[str]

    def train(self) -> Row:
        begun = time.perf_counter()
        curve = CONTENDERS[self.name](self.env, self.seed, self.steps, self.device, self.overrides)
        return {**self.row(curve, time.perf_counter() - begun), "cpu_seconds": round(time.process_time(), 1)}

    def row(self, curve: Curve, seconds: float) -> Row:
        return {"seed": self.seed, "steps": curve[-1][0], "mean_reward": curve[-1][1], "curve": curve,
                "seconds": round(seconds, 1),
                **{key: value for key, value in describe_machine().items() if key in ("date", "commit")}}

    def train_apart(self, limit_s: float | None) -> Row:
        """Train in a process of its own, for at most `limit_s`; an ended run is a row with `complete` false."""
        command = [sys.executable, __file__, "--one", self.name, "--env", self.env, "--seeds", str(self.seed),
                   "--steps", str(self.steps), "--device", self.device, *self.overrides]
        try:
            done = subprocess.run(command, capture_output=True, text=True, env=os.environ | THREADS, timeout=limit_s)
        except subprocess.TimeoutExpired as ended:
            lines = (ended.stdout or b"").decode().splitlines()
            curve = [(step, mean) for step, mean in map(json.loads, lines)]
            if not curve:
                raise RuntimeError(f"no evaluation within {limit_s} s") from None
            return {**self.row(curve, ended.timeout), "cpu_seconds": None, "complete": False}
        if done.returncode:
            raise RuntimeError(done.stderr)
        run: Row = json.loads(done.stdout.splitlines()[-1])
        return run


def report(rows: dict[str, list[dict]]) -> str:
    width = max(len(name) for name in rows)
    lines = []
    for name, runs in rows.items():
        returns = [run["mean_reward"] for run in runs]
        lines.append(f"{name:{width}}  median {statistics.median(returns):8.0f} of "
                     + ", ".join(f"{each:.0f}" for each in returns))
    return "\n".join(lines)


def draw(document: dict) -> Any:
    """Every seed as a thin line, and the median of each contender."""
    figure = blank(7, 4.2)
    axis, colours = figure.subplots(), dict(zip(CONTENDERS, COLOURS, strict=False))
    for name, runs in document["rows"].items():
        x = [step for step, _ in min((run["curve"] for run in runs), key=len)]
        curves = [[mean for _, mean in run["curve"]][:len(x)] for run in runs]
        for curve in curves if len(curves) > 1 else []:
            axis.plot(x, curve, color=colours[name], alpha=0.3, linewidth=1)
        middle = [statistics.median(values) for values in zip(*curves, strict=True)]
        axis.plot(x, middle, color=colours[name], linewidth=2.5, label=f"{name}, median of {len(curves)}")
    axis.set(title=document["env"], xlabel="environment steps", ylabel=f"return of {EPISODES} greedy episodes")
    axis.grid(alpha=0.3)
    axis.legend(loc="upper left")
    return figure


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", choices=list(RECIPES), default="HalfCheetah-v5")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--only", nargs="+", default=list(CONTENDERS), choices=list(CONTENDERS))
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--limit-s", type=float, help="seconds after which unfinished runs end")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/continuous_returns.json"))
    parser.add_argument("--one", choices=list(CONTENDERS), help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes of our recipe")
    return parser.parse_intermixed_args()


def main() -> None:
    args = arguments()
    if args.one:
        print(json.dumps(Run(args.one, args.env, args.seeds[0], args.steps, args.device, args.overrides).train()))
        return
    asked = {"env": args.env, "steps": args.steps, "overrides": args.overrides}
    document: dict = json.loads(args.out.read_text()) if args.out.exists() else {**asked, "rows": {}}
    rows = document["rows"]
    if {key: document[key] for key in asked} != asked:
        raise SystemExit(f"{args.out} holds runs of another kind: give another --out")
    todo = [(name, seed) for seed in args.seeds for name in args.only
            if all(run["seed"] != seed for run in rows.get(name, []))]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    failed = []
    with ThreadPoolExecutor(args.jobs) as pool:
        runs = [Run(name, args.env, seed, args.steps, args.device, args.overrides) for name, seed in todo]
        under_way = {pool.submit(run.train_apart, args.limit_s): (run.name, run.seed) for run in runs}
        for done in as_completed(under_way):
            name, seed = under_way[done]
            if (problem := done.exception()) is not None:
                failed.append(f"{name}, seed {seed}: {problem}")
                continue
            row = done.result()
            rows[name] = sorted([*rows.get(name, []), row], key=lambda row: row["seed"])
            print(f"{name}, seed {seed}: {row['mean_reward']:.0f} after {row['steps']:,} steps "
                  f"in {row['seconds']:.0f} s", flush=True)
            args.out.write_text(json.dumps({**document, "machine": describe_machine()}, indent=1) + "\n")
    if rows:
        print(report(rows))
    if failed:
        sys.exit("\n".join(["runs that failed:", *failed]))


if __name__ == "__main__":
    main()
