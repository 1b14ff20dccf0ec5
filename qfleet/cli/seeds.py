"""`train --seeds N --jobs M`: seeds in parallel processes, one line per finished seed, and a summary."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from argparse import Namespace
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qfleet.cli.output import print_error

if TYPE_CHECKING:
    from qfleet.api import TrainResult
    from qfleet.launch.run_process import RunOrder, RunPool
    from qfleet.process.signals import SignalledStop
    from qfleet.runconfig.resolution import Resolved
    from qfleet.runconfig.run_config import RunConfig

POLL_S = 0.1
PROGRESS_PERIOD_S = 10.0


class SeedRunner:
    """Trains runs in parallel and prints a line for each that ends."""

    def __init__(self, args: Namespace, orders: Sequence[RunOrder]) -> None:
        self.args, self.waiting = args, deque(orders)
        self.results: list[TrainResult] = []
        self.failed: list[tuple[RunConfig, str]] = []
        self._shown_at, self._steps = time.monotonic(), {order.directory.path.name: 0 for order in orders}
        self._total = sum(order.config.total_steps for order in orders)

    def train(self, pool: RunPool, stop: SignalledStop) -> None:
        while self.waiting or pool.running:
            if stop.reason is not None:
                self.waiting.clear()
                pool.request_stop()
            while self.waiting and pool.has_room:
                process = pool.start(self.waiting.popleft())
                self._say(f"seed {process.config.seed} started: {process.directory.path}")
            for process in pool.exited():
                self._end(process.config, *process.end())
            self._show(pool)
            time.sleep(POLL_S)

    def _end(self, config: RunConfig, result: TrainResult | None, error: str) -> None:
        from qfleet.cli.train import describe_ending
        from qfleet.report.status import format_score

        if result is None:
            self.failed.append((config, error))
            print_error(f"seed {config.seed} failed: {error}")
        else:
            self.results.append(result)
            score = "" if result.score is None else f", score {format_score(result.score)}"
            self._say(f"seed {config.seed}: {describe_ending(result)}{score}: {result.directory}")

    def _show(self, pool: RunPool) -> None:
        """Print the steps of all running seeds every few seconds."""
        for process in pool.running:
            for record in process.new_records():
                self._steps[process.directory.path.name] = int(record.get("step", 0))
        if pool.running and time.monotonic() - self._shown_at >= PROGRESS_PERIOD_S:
            self._shown_at = time.monotonic()
            parts = [f"seed {process.config.seed} {self._steps[process.directory.path.name]:,}"
                     for process in pool.running]
            done = sum(self._steps.values())
            self._say(f"{done:,} / {self._total:,} steps of all seeds  {', '.join(parts)}")

    def _say(self, text: str) -> None:
        if not self.args.quiet:
            print_error(text)


def train_parallel(args: Namespace, plans: Sequence[Resolved]) -> tuple[int, list[TrainResult], list[dict[str, Any]]]:
    """Train all plans, at most `args.jobs` at a time. Returns the worst exit code, the results and the failures.

    The logs are in a temporary folder, which stays only if a seed fails.
    """
    from qfleet.launch.run_process import RunOrder, RunPool, with_place
    from qfleet.process.signals import EXIT_CODES, SignalledStop, stop_on_signal

    orders = [RunOrder(with_place(plan.config, plan.config.run.root, name), plan.provenance, sys.argv)
              for plan, name in zip(plans, _names([plan.config for plan in plans]), strict=True)]
    _require_own_processes(plans[0].config)
    stop = SignalledStop()
    runner = SeedRunner(args, orders)
    folder = Path(tempfile.mkdtemp(prefix="qfleet-seeds-"))
    try:
        with stop_on_signal(stop), RunPool(folder, args.jobs) as pool:
            runner.train(pool, stop)
    finally:
        if not runner.failed:
            shutil.rmtree(folder, ignore_errors=True)
    places = [order.directory.path for order in orders]
    results = sorted(runner.results, key=lambda result: places.index(result.directory))
    failures = [{"directory": str(Path(config.run.root, str(config.run.name)).expanduser()), "seed": config.seed,
                 "error": error, "exit_code": 1} for config, error in runner.failed]
    codes = [1] * bool(failures) + [result.exit_code for result in results]
    if stop.reason is not None:
        return EXIT_CODES[stop.reason], results, failures
    return max(codes, default=0, key=lambda each: (each == 1, each)), results, failures


def summary(best: Sequence[float | None], scores: Sequence[float], seeds: int, stop_at: float | None) -> str:
    """Scores and best evaluations of several seeds: mean, minimum, and how many evaluations reached stop_at."""
    from qfleet.report.status import format_number

    known = [score for score in best if score is not None]
    parts = [f"{len(best)} of {seeds} seeds"]
    if scores:
        parts.append(f"score of the best policies, fresh episodes: mean {format_number(sum(scores) / len(scores))}, "
                     f"min {format_number(min(scores))}")
    if known:
        parts.append(f"best evaluation mean {format_number(sum(known) / len(known))}, min {format_number(min(known))}")
    if stop_at is not None:
        solved = sum(score >= stop_at for score in known)
        parts.append(f"{solved} of {seeds} solved (stop_at={format_number(stop_at)})")
    return ", ".join(parts)


def _names(configs: Sequence[RunConfig]) -> list[str]:
    """Name of every run; where the user chose none, one that no other process chooses in the same second."""
    from qfleet.runs.directory import default_name

    return [config.run.name or f"{default_name(config.env.id, config.agent.algo, config.seed)}-{os.getpid()}"
            for config in configs]


def _require_own_processes(config: RunConfig) -> None:
    from qfleet.core.errors import UserError

    if config.has_ranks and not config.has_driver:
        raise UserError("--jobs starts the runs as processes of its own: leave it out under torchrun or srun")


def run_order(args: Namespace) -> int:
    """Train or resume one run for the process that started this one."""
    from qfleet import api
    from qfleet.launch import run_process

    return run_process.run_order(
        Path(args.words[0]), lambda order: api.train(order.config, provenance=order.provenance),
        lambda run, trust: api.resume(run, trust=trust))
