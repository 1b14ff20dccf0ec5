"""Summaries of the runs under a root, for `qfleet ls` and `qfleet.list_runs`. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from qfleet.config import parse_mapping
from qfleet.config.objects import readable
from qfleet.core.errors import UserError
from qfleet.core.final_score import FinalScore
from qfleet.runs.directory import RunDirectory
from qfleet.runs.disk_space import disk_usage
from qfleet.runs.metric_writers import parse_record
from qfleet.runs.names import is_run, start_order, started_at
from qfleet.runs.run_state import may_be_running, run_state
from qfleet.runs.safe_open import open_no_follow

ListedState = Literal["running", "finished", "stopped", "interrupted", "failed", "crashed", "pruned", "elsewhere"]
LISTED: dict[str, ListedState] = {
    "running": "running", "ended": "finished", "stopped": "stopped", "interrupted": "interrupted", "failed": "failed",
    "died": "crashed", "pruned": "pruned", "elsewhere": "elsewhere"}
"""State of a run -> the word that lists show. `elsewhere`: locked by another host, so it may be running."""

TAIL_BYTES = 64 * 1024
MAX_CONFIG_BYTES = 256 * 1024
SECTIONS = re.compile(r"^(?:seed|total_steps|env|agent):.*\n(?:[ \t].*\n|\n)*", re.M)
"""The parts of config.yaml that a summary needs: parsing all of it would take three times as long."""


@dataclass(frozen=True)
class RunSummary:
    """A run in a list. Unknown values are None.

    Attributes:
        name: Name of the run.
        path: Run directory.
        state: `running`, `finished`, `stopped`, `interrupted`, `failed`, `crashed`, `pruned` or `elsewhere`.
        env: Environment.
        agent: Algorithm.
        seed: Seed.
        steps: Environment steps so far.
        total_steps: Length of the run.
        best: Best mean return of an evaluation during training.
        score: Score of the best policy over fresh episodes, once the run has ended.
        started: Time of the newest start or resume, seconds since the epoch.
        active: Time of the last change of its metrics, seconds since the epoch.
        bytes: Size on disk.
    """

    name: str
    path: Path
    state: ListedState
    env: str | None
    agent: str | None
    seed: int | None
    steps: int
    total_steps: int | None
    best: float | None
    score: FinalScore | None
    started: float
    active: float
    bytes: int


def list_runs(root: str | Path = "runs") -> list[RunSummary]:
    """List the runs of a directory, as `qfleet ls` does.

    Args:
        root: Directory that contains the runs. Broken runs are left out.

    Returns:
        Name, state, environment, steps, best evaluation and score of each run, the newest first.

    Raises:
        UserError: `root` is a file.

    Examples:
        >>> scored = [run for run in qfleet.list_runs() if run.score is not None]
        >>> best = max(scored, key=lambda run: run.score.mean)
    """
    return scan_runs(root)[0]


def scan_runs(root: str | Path = "runs") -> tuple[list[RunSummary], list[str]]:
    """Return all runs directly under root, the newest first, and notes on directories that were skipped."""
    folder = Path(root).expanduser()
    if not folder.is_dir():
        if folder.exists():
            raise UserError(f"{root} is a file, not a folder of runs (runs in another folder: --root DIR)")
        return [], []
    found: list[RunSummary] = []
    notes: list[str] = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or not path.is_dir():
            continue
        if not is_run(path):
            notes += _group_note(path)
            continue
        try:
            found.append(summarise(RunDirectory(path)))
        except (UserError, OSError) as error:
            notes.append(f"skipped {path}: {getattr(error, 'strerror', None) or str(error).splitlines()[0]}")
    return sorted(found, key=lambda run: start_order(run.path), reverse=True), notes


def summarise(run: RunDirectory) -> RunSummary:
    """Read the summary of a run; UserError or OSError if it is broken."""
    state = run_state(run)
    config = _config(run) if run.config.exists() or not may_be_running(state) else {}
    step, best = _progress(run.metrics)
    started = started_at(run.path)
    active = run.metrics.lstat().st_mtime if run.metrics.exists() else started
    return RunSummary(run.path.name, run.path, LISTED[state], readable(_text(config, "env", "id") or "") or None,
                      _text(config, "agent", "algo"), _whole(config.get("seed")), step,
                      _whole(config.get("total_steps")), best,
                      None if may_be_running(state) else run.final_score(), started, max(active, started),
                      disk_usage(run.path).bytes)


def _group_note(path: Path) -> list[str]:
    """Say where more runs are, if a directory that is no run contains some."""
    try:
        inside = sum(is_run(child) for child in path.iterdir() if child.is_dir())
    except OSError:
        return []
    return [f"{path} contains {inside} more run{'s' * (inside != 1)}: qfleet ls --root {path}"] if inside else []


def _config(run: RunDirectory) -> dict[str, Any]:
    with open_no_follow(run.config) as file:
        text = file.read(MAX_CONFIG_BYTES).decode("utf-8", errors="replace")
    return parse_mapping("".join(SECTIONS.findall(text)), str(run.config))


def _progress(metrics: Path) -> tuple[int, float | None]:
    """Step of the last record, and the newest value of eval/best_reward."""
    step: int | None = None
    for record in _records_from_the_end(metrics):
        step = int(record.get("step", 0)) if step is None else step
        if record.get("eval/best_reward") is not None:
            return step, float(record["eval/best_reward"])
    return step or 0, None


def _records_from_the_end(metrics: Path) -> Iterator[dict[str, Any]]:
    if not metrics.exists():
        return
    with open_no_follow(metrics) as file:
        end = file.seek(0, 2)
        file.seek(max(0, end - TAIL_BYTES))
        tail = file.read()
        yield from filter(None, map(parse_record, reversed(tail.splitlines())))
        if end <= TAIL_BYTES:
            return
        # Evaluations may be rare: search the rest for the newest one, without parsing the records in between.
        file.seek(0)
        rest = file.read(end - TAIL_BYTES)
        place = rest.rfind(b'"eval/best_reward"')
        line = rest[rest.rfind(b"\n", 0, place) + 1:].partition(b"\n")[0] if place >= 0 else b""
        yield from filter(None, [parse_record(line)])


def _text(config: dict[str, Any], section: str, key: str) -> str | None:
    found = config.get(section)
    value = found.get(key) if isinstance(found, dict) else None
    return value if isinstance(value, str) else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
