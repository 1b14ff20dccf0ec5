"""Updates to solve CartPole when every gradient is some updates old: plain, and with delay compensation.

    nice -n 10 python benchmarks/staleness.py [--staleness 8] [--seeds 10] [--out benchmarks/results/staleness.json]

One process, one learner, one shard. Between the two stands a line that delivers every gradient `staleness` updates
late, as if so many other learners had been quicker each time: the shard sees them in turn, and compensates with the
weights that each of them had pulled. A run is solved when two greedy evaluations in a row, of 10 episodes each, reach
475: one alone may be luck. They are 1,000 steps apart, so counts are exact to 500 updates. Runs that do not get there
in 50,000 steps count with all the updates that they made, and are told apart. Finished runs are saved, not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from sinks import Sink
from speed import describe_machine

from qfleet.core.compute import seeded_network
from qfleet.core.seeds import seed_for
from qfleet.optim.flat_params import Flat
from qfleet.runconfig.auto import resolve_auto
from qfleet.runconfig.build import make_acting_setup, make_env, make_plan
from qfleet.runconfig.resolution import resolve
from qfleet.sync.ps_client import ParameterServerSync
from qfleet.sync.ps_shard import ParameterServerConfig, Push, PushPullResult, PushResult, Shard
from qfleet.training.learner_core import Components, Hooks
from qfleet.training.learner_run import LearnerRun
from qfleet.training.loop import StopRule

RULES: dict[str, tuple[int, list[str]]] = {
    "in time": (0, []),
    "asgd": (1, []),
    "dc-asgd constant 0.04": (1, ["parameter_server.compensation=constant",
                                  "parameter_server.compensation_lambda=0.04"]),
    "dc-asgd adaptive 2": (1, ["parameter_server.compensation=adaptive", "parameter_server.compensation_lambda=2"]),
}
"""Name -> whether gradients are late, and what the server does about it; strengths are those of the paper."""


class Late:
    """A shard at the end of a long line. Implements `Shelf`."""

    def __init__(self, shard: Shard, staleness: int) -> None:
        self.shard, self.staleness = shard, staleness
        self.waiting: deque[Push] = deque()
        self.pulls = 0

    def push_pull(self, worker: str, push: Push | None, pull: bool) -> Callable[[], PushPullResult]:
        answer = None
        if push is not None:
            self.waiting.append(replace(push, worker=self.name))
            answer = PushResult("applied", self.shard.version, 0)
            if len(self.waiting) > self.staleness:
                answer = self.shard.push(self.waiting.popleft())
        self.pulls += pull
        shown = self.shard.pull(self.name) if pull else None
        return lambda: (answer, shown)

    @property
    def name(self) -> str:
        """Who pulled last: one learner plays so many that each pushes once before it pulls again."""
        return f"learner {self.pulls % (self.staleness + 1)}"


class Twice(Sink):
    """A sink that ends a run after two good evaluations in a row."""

    def __init__(self) -> None:
        self.scores: list[float] = []
        self.stop: StopRule | None = None

    def write(self, record: Mapping[str, Any]) -> None:
        if "eval/mean_reward" in record:
            self.scores.append(record["eval/mean_reward"])
        if self.stop is not None and len(self.scores) > 1 and min(self.scores[-2:]) >= 475:
            self.stop.reason = "stop_at"



def train(staleness: int, overrides: list[str], seed: int) -> dict:
    config = resolve("cartpole", [*overrides, "sync=server", f"seed={seed}", "eval.period_steps=1000",
                                  "eval.episodes=10", "stop_at=null", "device=cpu", "run.threads=1"]).config
    with ExitStack() as stack:
        env = make_env(config.env, config.env.lanes)
        stack.callback(env.close)
        config = resolve_auto(config, env.spec)
        torch.set_num_threads(1)
        cast = make_acting_setup(config, env)
        stack.callback(cast.close)
        sink = Twice()
        outside = Hooks([sink], lambda snapshot: None, lambda *best: True, lambda sample, update: None)
        plan, rule = make_plan(config), config.parameter_server
        initial = Flat(seeded_network(cast.agent, seed_for(plan.seed, "network"))).master
        shard = Shard("shard 0", initial, plan.learner, ParameterServerConfig(**rule.model_dump()))
        single = LearnerRun(cast, plan, outside, replace(
            Components.single(plan),
            make_sync=lambda replay, meter: ParameterServerSync("learner", [Late(shard, staleness)], rule, meter)))
        sink.stop = single.core.stop
        learner = single.core.learner
        reason = single.run()
    ages = {str(age): count for age, count in sorted(shard.staleness.items())}
    return {"seed": seed, "updates": learner.updates, "steps": single.core.progress().steps,
            "solved": reason == "stop_at", "best": max(sink.scores), "staleness": ages}


def report(rows: dict[str, list[dict]]) -> dict:
    """Medians over seeds, and of each rule the median ratio to plain ASGD, seed by seed."""
    plain = {run["seed"]: run["updates"] for run in rows.get("asgd", [])}
    found = {}
    for name, runs in rows.items():
        ratios = [run["updates"] / plain[run["seed"]] for run in runs if run["seed"] in plain]
        found[name] = {"solved": sum(run["solved"] for run in runs), "of": len(runs),
                       "median_updates": statistics.median(run["updates"] for run in runs),
                       "median_ratio_to_asgd": round(statistics.median(ratios), 3) if ratios else None}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--staleness", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--only", nargs="*", default=list(RULES), choices=list(RULES))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/staleness.json"))
    args = parser.parse_args()
    saved = json.loads(args.out.read_text()) if args.out.exists() else {}
    rows = saved.get("rows", {}) if saved.get("staleness") == args.staleness else {}
    rows = {name: rows.get(name, []) for name in RULES}
    for seed in range(1, args.seeds + 1):
        for name in args.only:
            late, overrides = RULES[name]
            if any(run["seed"] == seed for run in rows[name]):
                continue
            rows[name].append(train(late * args.staleness, overrides, seed))
            print(name, rows[name][-1], flush=True)
            done = {each: runs for each, runs in rows.items() if runs}
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps({"staleness": args.staleness, "summary": report(done), "rows": rows,
                                            "machine": describe_machine()}, indent=1) + "\n")
    for name, figures in report({name: runs for name, runs in rows.items() if runs}).items():
        print(f"{name:22} {figures}")


if __name__ == "__main__":
    main()
