"""Runs in processes of their own, started and watched by this one: several seeds, or the trials of a study."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from qfleet.accel.threads import usable_cores
from qfleet.config import parse_mapping, to_yaml, validate
from qfleet.launch.train_result import TrainResult
from qfleet.process.handle import ChildSpec, LocalProcess, child_environment
from qfleet.process.heartbeat import ORPHAN_GRACE_S, HeartbeatSender
from qfleet.process.supervisor import first_traceback
from qfleet.runconfig.run_config import RunConfig
from qfleet.runs.directory import RunDirectory, replace_text
from qfleet.runs.metric_writers import read_metrics
from qfleet.runs.run_state import may_be_running, run_state
from qfleet.runs.tail import MetricsTail

TRACEBACK = "Traceback (most recent call last):"


@dataclass(frozen=True)
class RunOrder:
    """Order to train a run, as a file for the process that does it."""

    config: RunConfig
    provenance: Mapping[str, str]
    command: Sequence[str] = ()
    """Command line of the program that gives the order, which the run records as its own."""
    may_exist: bool = False
    """Resume the run if its directory exists, which is an error otherwise."""
    trust: bool = False
    """Resume also a run that was not created here and that names code."""

    @property
    def directory(self) -> RunDirectory:
        assert self.config.run.name is not None
        return RunDirectory(Path(self.config.run.root).expanduser() / self.config.run.name)

    def write(self, path: Path) -> None:
        replace_text(path, json.dumps({"config": to_yaml(self.config), "provenance": dict(self.provenance),
                                       "command": list(self.command), "may_exist": self.may_exist,
                                       "trust": self.trust}))

    @staticmethod
    def read(path: Path) -> RunOrder:
        found = json.loads(path.read_text())
        return RunOrder(validate(RunConfig, parse_mapping(found["config"], str(path))), found["provenance"],
                        found["command"], found["may_exist"], found["trust"])


def run_order(path: Path, train: Callable[[RunOrder], TrainResult], resume: Callable[[Path, bool], TrainResult]) -> int:
    """Main function of the process: train or resume, and write the result beside the order.

    `resume` takes the path of the run, and whether the run is trusted.
    """
    heartbeat = HeartbeatSender.from_env()
    if heartbeat is not None:
        heartbeat.on_orphan(lambda: os.kill(os.getpid(), signal.SIGTERM))
    order = RunOrder.read(path)
    sys.argv = list(order.command)
    directory = order.directory
    result = resume(directory.path, order.trust) if order.may_exist and _has_begun(directory) else train(order)
    replace_text(_result_path(path), json.dumps(result.to_json()))
    return result.exit_code


def _has_begun(directory: RunDirectory) -> bool:
    """True if there is a run to resume. One whose process was killed before it had written the config is removed."""
    _wait_for_orphan(directory)
    never_began = directory.record.is_file() and not directory.config.exists()
    if never_began and not may_be_running(run_state(directory)):
        directory.discard()
    return directory.path.exists()


def _wait_for_orphan(directory: RunDirectory) -> None:
    """Wait for a process whose parent was killed, and which is still saving the run that this one is to resume."""
    until = time.monotonic() + 2 * ORPHAN_GRACE_S
    while run_state(directory) == "running" and time.monotonic() < until:
        time.sleep(0.2)


def _result_path(order: Path) -> Path:
    return order.with_suffix(".result.json")


class RunProcess:
    """One run in a process of its own. `folder` receives its order, its log and its result."""

    def __init__(self, order: RunOrder, folder: Path, threads: int) -> None:
        self.directory, self.config = order.directory, order.config
        folder.mkdir(parents=True, exist_ok=True)
        self._order = folder / f"{self.directory.path.name}.json"
        _result_path(self._order).unlink(missing_ok=True)
        order.write(self._order)
        self._tail = MetricsTail(self.directory.metrics, from_start=True)
        argv = [sys.executable, "-m", "qfleet", "_run-order", str(self._order)]
        environment = child_environment() | {"OMP_NUM_THREADS": str(threads)}
        child = ChildSpec(self.directory.path.name, argv, environment, self._order.with_suffix(".log"))
        self._process = LocalProcess(child, 1, time.monotonic())
        self._stopping = False

    @property
    def exited(self) -> bool:
        return self._process.exited

    def new_records(self) -> list[dict[str, Any]]:
        """Metric records since the last call; after a resume, older ones may come again."""
        return list(self._tail.new_records())

    def scores(self) -> list[float]:
        """Mean return of every evaluation of the run so far."""
        return evaluation_scores(self.directory.path)

    def request_stop(self) -> None:
        """Ask the process to save its run and to exit. Saving a large replay may take minutes."""
        if not self._stopping:
            self._stopping = True
            self._process.request_stop()

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> tuple[TrainResult | None, str]:
        """Reap the process; its result, or None and an error in one line."""
        code = self._process.reap()
        try:
            return TrainResult.from_json(json.loads(_result_path(self._order).read_text())), ""
        except (OSError, ValueError, TypeError, KeyError):
            return None, self._error(code)

    def _error(self, code: int) -> str:
        log = self._process.log_tail()
        known = str((self.directory.ending() or {}).get("error") or "")
        if known.endswith(TRACEBACK) and (found := first_traceback(log)):
            known = known.removesuffix(TRACEBACK) + found.splitlines()[-1]
        lines = [line for line in log.splitlines()[1:] if line.strip()]
        said = known or (lines[-1].removeprefix("error: ") if lines else "")
        ended = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"{said.strip() or ended} (log: {self._process.log_path})"


def evaluation_scores(run: Path) -> list[float]:
    """Mean return of every evaluation in the metrics of a run."""
    found = (record.get("eval/mean_reward") for record in read_metrics(run / "metrics.jsonl"))
    return [float(score) for score in found if score is not None]


class RunPool:
    """Runs in at most `jobs` processes at a time, which share the cores. Leaving the context kills what is left."""

    def __init__(self, folder: Path, jobs: int) -> None:
        self.folder, self.jobs = folder, jobs
        self.running: list[RunProcess] = []
        self._threads = threads_per_job(jobs)

    @property
    def has_room(self) -> bool:
        return len(self.running) < self.jobs

    def start(self, order: RunOrder) -> RunProcess:
        process = RunProcess(order, self.folder, self._threads)
        self.running.append(process)
        return process

    def exited(self) -> Iterator[RunProcess]:
        """Processes that have exited since the last call."""
        for process in list(self.running):
            if process.exited:
                self.running.remove(process)
                yield process

    def request_stop(self) -> None:
        """Ask all processes to save their runs and to exit."""
        for process in self.running:
            process.request_stop()

    def __enter__(self) -> RunPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        for process in self.running:
            process.kill()
            process.end()


def threads_per_job(jobs: int) -> int:
    """Threads of each of several processes that share the cores; OMP_NUM_THREADS, if set, is the limit."""
    share = max(1, usable_cores() // jobs)
    limit = os.environ.get("OMP_NUM_THREADS", "")
    return min(share, int(limit)) if limit.isdecimal() and int(limit) > 0 else share


def with_place(config: RunConfig, root: Path | str, name: str) -> RunConfig:
    """Config of a run in the directory `root/name`."""
    return config.model_copy(update={"run": config.run.model_copy(update={"root": str(root), "name": name})})


def remove_saved_state(directory: RunDirectory) -> None:
    """Remove the checkpoints that only resuming needs; the best policy stays."""
    for path in directory.checkpoints.glob("step-*"):
        shutil.rmtree(path, ignore_errors=True)

