"""Trains the development suite with several contenders, and ranks them. Chooses and shows the default recipes.

    python benchmarks/suite.py run [--tasks ...] [--contenders ...] [--candidates FILE] [--seeds ...] [--jobs N]
        [--limit-s S] [--steps N] [--out FILE]
    python benchmarks/suite.py rank [FILE] [--contenders ...]
    python benchmarks/suite.py table [FILE]

Contenders: `default` (`qfleet train ENV_ID` with nothing but the number of steps), `recipe` (the packaged recipe that
names the environment), `sb3` (Stable-Baselines3's DQN or TD3 with its defaults), `sb3-zoo` (with tuned settings, mostly
of rl-zoo3), and the candidates of --candidates, a YAML file with lists of key=value over the default:

    soft-target: [learner.target_period_updates=0, learner.target_tau=0.005]

Every cell (task, contender, seed) is a process with one thread and without a GPU. Its score is the mean return of fresh
greedy episodes of the run's best policy. CPU and wall seconds are those of the training with its evaluations. `run`
trains the cells that FILE does not contain with the current settings, the longest first, and appends one line of JSON
for each. At the time limit it ends the unfinished ones; the next call starts them again if it has more time for them
than this one had. Tasks are in suite.yaml.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import suite_tables
from speed import describe_machine
from suite_cells import CONTENDERS, Absent, Cell, one_thread, read_candidates, settings_of, tasks, train

from qfleet.cli.options import at_least
from qfleet.core.errors import UserError

OUT = Path(__file__).parent / "results" / "suite.jsonl"
SEEDS = [1, 2, 3, 4, 5]
POLL_S, STOP_S = 0.2, 10.0
MARGIN = 1.2
"""A cell is not started unless there is time for `MARGIN` times the longest earlier one of its task and contender."""

Record = dict[str, Any]


class Job(Protocol):
    """A cell in training."""

    def result(self) -> Record | None:
        """The rest of its record, or None while it is training."""

    def stop(self) -> None: ...


class CellProcess:
    """A process that trains one cell, and the files in `folder` that receive its output."""

    def __init__(self, cell: Cell, folder: str) -> None:
        name = "-".join([cell.task.name.replace("/", "-"), cell.contender, str(cell.seed)])
        self._out, self._err = Path(folder, f"{name}.out"), Path(folder, f"{name}.err")
        with self._out.open("w") as out, self._err.open("w") as err:
            self._process = subprocess.Popen(
                [sys.executable, __file__, "cell", json.dumps(cell.header())], stdout=out, stderr=err,
                env=one_thread(), start_new_session=True)

    def result(self) -> Record | None:
        code = self._process.poll()
        if code is None:
            return None
        if code == 0:
            found: Record = json.loads(self._out.read_text().splitlines()[-1])
            return found
        return {"status": "failed", "reason": f"exit code {code}: {self._err.read_text()[-1500:].strip()}"}

    def stop(self) -> None:
        """End the process and its children: SIGTERM first, then SIGKILL."""
        for number, wait_s in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, None)):
            try:
                os.killpg(self._process.pid, number)
                self._process.wait(wait_s)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


def train_cells(cells: Iterable[Cell], jobs: int, deadline: float, expected_s: Callable[[Cell], float],
                start: Callable[[Cell], Job], finished: Callable[[Cell, Record], None]) -> list[Cell]:
    """Train cells, `jobs` at a time, the most expensive first; returns those that did not fit into the time."""
    waiting = sorted(cells, key=lambda cell: -cell.cost)
    running: list[tuple[Cell, Job, float]] = []
    left: list[Cell] = []
    try:
        while waiting or running:
            for each in list(running):
                if (record := each[1].result()) is not None:
                    running.remove(each)
                    finished(each[0], record)
            if time.monotonic() >= deadline:
                break
            while waiting and len(running) < jobs:
                cell = waiting.pop(0)
                if time.monotonic() + expected_s(cell) > deadline:
                    left.append(cell)
                else:
                    running.append((cell, start(cell), time.monotonic()))
            if running:
                time.sleep(POLL_S)
    except KeyboardInterrupt:
        print("interrupted: ending the cells in training", file=sys.stderr)
    finally:
        for _, job, _ in running:
            job.stop()
    for cell, _, begun in running:
        wall_s = round(time.monotonic() - begun, 1)
        finished(cell, {"status": "stopped", "reason": f"unfinished after {wall_s:.0f} s", "wall_s": wall_s})
    return [*left, *waiting, *(cell for cell, _, _ in running)]


def run(args: argparse.Namespace) -> int:
    """Train the missing cells; the exit code is 1 if one failed."""
    begun = time.monotonic()
    candidates = read_candidates(args.candidates)
    records = suite_tables.read(args.out)
    counts: Counter[str] = Counter()
    cells: list[Cell] = []

    def note(name: str, found: Record) -> None:
        counts[found["status"]] += 1
        print(f"{name.rstrip()}: {told(found)}", flush=True)

    def finished(cell: Cell, found: Record) -> None:
        note(f"{cell.task.name:25} {cell.contender:20} seed {cell.seed}", found)
        append(args.out, cell.header() | found)

    for name in args.tasks or tasks():
        for contender in known_contenders(args.contenders, candidates):
            found, reason = wanted(name, contender, candidates, args)
            cells += found
            if reason:
                note(f"{name:25} {contender:20}", reason)
                if not any(says(record, name, contender, reason) for record in records):
                    append(args.out, {"task": name, "contender": contender, **reason})
    done = {key_of(record) for record in records if record["status"] == "done"}
    missing = [cell for cell in cells if cell.key not in done]
    print(f"{len(missing)} of {len(cells)} cells to train", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        left = train_cells(missing, args.jobs, begun + (args.limit_s or float("inf")), expectation(records),
                           lambda cell: CellProcess(cell, folder), finished)
    if left:
        print(f"{len(left)} cells are left; run the same command again, with more time if they were stopped before")
    print(", ".join(f"{count} {status}" for status, count in counts.items()) or "nothing was trained")
    return 1 if counts["failed"] else 0


def known_contenders(chosen: Sequence[str] | None, candidates: dict[str, list[str]]) -> list[str]:
    """The chosen contenders, or all; an unknown name is a UserError."""
    names = [*CONTENDERS, *candidates]
    if unknown := [name for name in chosen or () if name not in names]:
        raise UserError(f"--contenders {' '.join(unknown)}: there are {', '.join(names)}; "
                        "name a file of candidates with --candidates")
    return list(chosen or names)


def append(path: Path, record: Record) -> None:
    """Add a record and what it was made with to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(record | {"machine": describe_machine()}) + "\n")


def wanted(name: str, contender: str, candidates: dict[str, list[str]],
           args: argparse.Namespace) -> tuple[list[Cell], Record | None]:
    """Cells of a task and a contender, or the reason why there are none."""
    task = tasks()[name]
    try:
        settings = settings_of(task, contender, candidates, min(args.steps or task.steps, task.steps))
    except Absent as why:
        return [], {"status": "absent", "reason": str(why)}
    except UserError as error:
        return [], {"status": "failed", "reason": str(error)}
    return [Cell(task, contender, seed, settings) for seed in args.seeds], None


def says(record: Record, task: str, contender: str, reason: Record) -> bool:
    """True if a record already says that there is no such cell, and why."""
    return (record["task"], record["contender"]) == (task, contender) and reason.items() <= record.items()


def key_of(record: Record) -> tuple[str, str, int, str]:
    return record["task"], record["contender"], record["seed"], record["settings"]["digest"]


def expectation(records: Sequence[Record]) -> Callable[[Cell], float]:
    """How long a cell is expected to take, in seconds, by the earlier ones of its task and contender; else 0."""
    def expected_s(cell: Cell) -> float:
        same = [record["wall_s"] for record in records if "wall_s" in record and key_of(record)[:2] == cell.key[:2]
                and record["settings"]["total_steps"] == cell.settings["total_steps"]]
        return MARGIN * max(same, default=0.0)

    return expected_s


def told(found: Record) -> str:
    """A record as one line."""
    if found["status"] != "done":
        return f"{found['status']}: {found['reason']}"
    verdict = {True: "solved", False: "not solved", None: "trained"}[found["solved"]]
    return (f"{verdict}, {found['score']:g} in {found['episodes']:,} fresh episodes, {found['steps']:,} steps, "
            f"{found['cpu_s']:.0f} s of CPU")


def train_one(text: str) -> int:
    """The process of a cell: train it, and print the rest of its record as the last line."""
    asked = json.loads(text)
    cell = Cell(tasks()[asked["task"]], asked["contender"], asked["seed"], asked["settings"])
    try:
        found = train(cell)
    except ImportError as error:
        found = {"status": "absent", "reason": f"{error.name or error} is not installed"}
    except UserError as error:
        found = {"status": "failed", "reason": str(error)}
    except Exception as error:
        traceback.print_exc()
        found = {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
    print(json.dumps(found), flush=True)
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run", help="train the cells that FILE does not have", allow_abbrev=False)
    runs.add_argument("--tasks", nargs="+", choices=list(tasks()), metavar="ID", help="default: all of suite.yaml")
    runs.add_argument("--contenders", nargs="+", metavar="NAME", help="default: all, and all candidates")
    runs.add_argument("--candidates", type=Path, metavar="FILE", help="YAML file: name: [key=value, ...]")
    runs.add_argument("--seeds", nargs="+", type=at_least(0), default=SEEDS, metavar="N", help="default: 1 to 5")
    runs.add_argument("--jobs", type=at_least(1), default=1, metavar="N", help="cells at a time (default: 1)")
    runs.add_argument("--limit-s", type=at_least(1), metavar="S", help="end after this many seconds")
    runs.add_argument("--steps", type=at_least(1), metavar="N", help="train at most this many steps, to try the script")
    runs.add_argument("--out", type=Path, default=OUT, metavar="FILE", help=f"default: {OUT.name} in results")
    for name, what in (("rank", "compare the contenders of FILE"), ("table", "print the table of the documentation")):
        shows = commands.add_parser(name, help=what, allow_abbrev=False)
        shows.add_argument("file", type=Path, nargs="?", default=OUT, metavar="FILE", help=f"default: {OUT.name}")
        if name == "rank":
            shows.add_argument("--contenders", nargs="+", metavar="NAME", help="rank only these (default: all of FILE)")
    commands.add_parser("cell").add_argument("cell")  # the process of one cell
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.command == "cell":
        return train_one(args.cell)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if args.command == "run":
            return run(args)
        records = suite_tables.read(args.file)
        if not records:
            raise UserError(f"{args.file}: has no records; train some with `python benchmarks/suite.py run`")
        print(suite_tables.ranking(records, args.contenders) if args.command == "rank" else suite_tables.table(records))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
