"""`train --seeds N --jobs M`: seeds in parallel processes, one line per finished seed, and a summary."""

from __future__ import annotations

import tempfile
import time
from argparse import Namespace
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qfleet.cli.output import print_error

if TYPE_CHECKING:
    from qfleet.api import TrainResult
    from qfleet.launch.run_process import RunOrder, RunPool
    from qfleet.runconfig.resolution import Resolved
    from qfleet.runconfig.run_config import RunConfig

POLL_S = 0.1
PROGRESS_PERIOD_S = 10.0
EXIT_CODES = {"interrupted": 130, "preempted": 75}


class SignalledStop:
    """What a signal sets: the reason to stop."""

    reason: str | None = None


class SeedRunner:
    """Trains runs in parallel and prints a line for each that ends."""

    def __init__(self, args: Namespace, orders: Sequence[RunOrder]) -> None:
        self.args, self.waiting = args, deque(orders)
        self.results: list[TrainResult] = []
        self.failed = 0
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

        if result is None:
            self.failed += 1
            print_error(f"seed {config.seed} failed: {error}")
        else:
            self.results.append(result)
            self._say(f"seed {config.seed}: {describe_ending(result)}: {result.directory}")

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


def train_parallel(args: Namespace, plans: Sequence[Resolved]) -> tuple[int, list[TrainResult]]:
    """Train all plans, at most `args.jobs` at a time. Returns the worst exit code and the results."""
    from qfleet.launch.run_process import RunOrder, RunPool, with_place
    from qfleet.process.signals import stop_on_signal

    orders = [RunOrder(with_place(plan.config, plan.config.run.root, name), plan.provenance)
              for plan, name in zip(plans, _names([plan.config for plan in plans]), strict=True)]
    _require_own_processes(plans[0].config)
    stop = SignalledStop()
    runner = SeedRunner(args, orders)
    with tempfile.TemporaryDirectory(prefix="qfleet-seeds-") as folder, stop_on_signal(stop), \
            RunPool(Path(folder), args.jobs) as pool:
        runner.train(pool, stop)
    places = [order.directory.path for order in orders]
    results = sorted(runner.results, key=lambda result: places.index(result.directory))
    codes = [1] * bool(runner.failed) + [result.exit_code for result in results]
    if stop.reason is not None:
        return EXIT_CODES[stop.reason], results
    return max(codes, default=0, key=lambda each: (each == 1, each)), results


def summary(best: Sequence[float | None], seeds: int, stop_at: float | None) -> str:
    """Best evaluations of several seeds: mean, minimum, and how many reached stop_at."""
    from qfleet.report.status import format_number

    known = [score for score in best if score is not None]
    parts = [f"{len(best)} of {seeds} seeds"]
    if known:
        parts.append(f"best evaluation mean {format_number(sum(known) / len(known))}, min {format_number(min(known))}")
    if stop_at is not None:
        solved = sum(score >= stop_at for score in known)
        parts.append(f"{solved} of {seeds} solved (stop_at={format_number(stop_at)})")
    return ", ".join(parts)


def _names(configs: Sequence[RunConfig]) -> list[str]:
    """Name of every run; where the user chose none, one that is free."""
    from qfleet.runs.directory import default_name

    names = []
    for config in configs:
        name = config.run.name or default_name(config.env.id, config.agent.algo, config.seed)
        if config.run.name is None:
            numbered = (name if number == 1 else f"{name}-{number}" for number in range(1, 1000))
            name = next(each for each in numbered if not Path(config.run.root, each).expanduser().exists())
        names.append(name)
    return names


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
        lambda run: api.resume(run, trust=True))
