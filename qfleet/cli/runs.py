"""Commands that manage runs: `ls` and `rm`."""

from __future__ import annotations

import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qfleet.cli.output import print_error, print_line, print_result, table

if TYPE_CHECKING:
    from qfleet.runs.directory import RunDirectory
    from qfleet.runs.listing import RunSummary

SHOWN_RUNS = 30
COLUMNS = ("run", "state", "environment", "agent", "steps", "best", "score", "age", "size")
DROPPED = ("agent", "size", "environment", "age", "steps", "state")
"""Columns in the order in which they are left out in a narrow terminal."""

MIN_NAME, SPACE = 12, 2


def ls(args: Namespace) -> int:
    """List the runs under the root."""
    from qfleet.runs.listing import scan_runs

    found, notes = scan_runs(args.root)
    chosen = _sorted([run for run in found if _contains(run, args.words)], args.sort)
    for note in notes:
        print_error(note)
    if not chosen and not args.json:
        where = Path(args.root).expanduser().resolve()
        words = f"no run in {where} matches {' and '.join(map(repr, args.words))}"
        print_error(words if found else f"there are no runs in {where} (runs in another folder: --root DIR)")
        return 0
    terminal = sys.stdout is not None and sys.stdout.isatty()
    shown = chosen[:SHOWN_RUNS] if terminal and not args.all else chosen
    width = shutil.get_terminal_size().columns if terminal else None
    lines = [] if args.json else _table(shown, width)
    if len(shown) < len(chosen):
        lines.append(f"{len(chosen) - len(shown)} more: qfleet ls --all")
    print_result(args, lines, [_document(run) for run in chosen])
    return 0


def _contains(run: RunSummary, words: Sequence[str]) -> bool:
    text = " ".join(filter(None, (run.name, run.env, run.agent, run.state))).casefold()
    return all(word.casefold() in text for word in words)


def _sorted(runs: Sequence[RunSummary], key: str) -> list[RunSummary]:
    """Sort runs, which are given the newest first; equal ones stay in that order."""
    keys: dict[str, Any] = {
        "age": lambda run: 0, "name": lambda run: run.name, "size": lambda run: -run.bytes,
        "score": lambda run: (_score(run) is None, -(_score(run) or 0.0))}
    return sorted(runs, key=keys[key])


def _score(run: RunSummary) -> float | None:
    """Score of the best policy over fresh episodes; the best evaluation of a run without one."""
    return run.best if run.score is None else run.score.mean


def _document(run: RunSummary) -> dict[str, Any]:
    times = {name: datetime.fromtimestamp(getattr(run, name)).astimezone().isoformat(timespec="seconds")
             for name in ("started", "active")}
    return asdict(run) | times | {"path": str(run.path), "age_s": round(max(0.0, time.time() - run.started), 1)}


def _table(runs: Sequence[RunSummary], width: int | None) -> list[str]:
    """Rows under a heading; without the less important columns, and with shorter names, if they are too wide."""
    rows = [dict(zip(COLUMNS, COLUMNS, strict=True)), *map(_row, runs)]
    columns = list(COLUMNS)

    def taken(names: Sequence[str]) -> int:
        return sum(max(len(row[name]) for row in rows) + SPACE for name in names) - SPACE

    for name in DROPPED:
        others = [column for column in columns if column != "run"]
        least = min(MIN_NAME * 2, max(len(row["run"]) for row in rows))
        if width is None or taken(others) + SPACE + least <= width:
            break
        columns.remove(name)
    if width is not None:
        room = max(MIN_NAME, width - taken([column for column in columns if column != "run"]) - SPACE)
        for row in rows:
            row["run"] = row["run"] if len(row["run"]) <= room else row["run"][:room - 1] + "…"
    return table([[row[name] for name in columns] for row in rows])


def _row(run: RunSummary) -> dict[str, str]:
    from qfleet.core.units import format_bytes
    from qfleet.report.status import format_number

    total = "" if run.total_steps is None else f" / {run.total_steps:,}"
    best = "-" if run.best is None else format_number(run.best)
    score = "-" if run.score is None else format_number(run.score.mean)
    cells = (_printable(run.name), run.state, _printable(run.env or "-"), _printable(run.agent or "-"),
             f"{run.steps:,}{total}", best, score, format_age(time.time() - run.started), format_bytes(run.bytes))
    return dict(zip(COLUMNS, cells, strict=True))


def format_age(seconds: float) -> str:
    """Return an age in its largest unit: `40 s`, `12 min`, `3 h`, `5 d`."""
    for unit, size, limit in (("s", 1, 60), ("min", 60, 3600), ("h", 3600, 48 * 3600)):
        if seconds < limit:
            return f"{max(0, int(seconds // size))} {unit}"
    return f"{int(seconds // 86_400)} d"


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def rm(args: Namespace) -> int:
    """Remove runs after a confirmation."""
    from qfleet.core.errors import UserError
    from qfleet.core.units import format_bytes
    from qfleet.runs.removal import freed_by, remove_checkpoints, remove_run

    runs = _selected(args)
    if not runs:
        print_result(args, ["no run is selected"], {"removed": [], "freed_bytes": 0})
        return 0
    sizes = {run.path: freed_by(run, args.keep_best) for run in runs}
    total = format_bytes(sum(sizes.values()))
    what = f"{'the checkpoints of ' if args.keep_best else ''}{len(runs)} run{'s' * (len(runs) > 1)}, {total}"
    if not (args.dry_run or args.yes):
        _require_terminal()
    if not args.json:
        for line in table([[str(path), format_bytes(size)] for path, size in sizes.items()]):
            print_line(line)
    if args.dry_run:
        print_result(args, [f"would remove {what}"], _removal(sizes, sum(sizes.values())))
        return 0
    if not args.yes and not _confirmed(f"remove {what}? [y/N]"):
        print_error("nothing was removed")
        return 1
    freed, failed = {}, []
    for run in runs:
        try:
            freed[run.path] = remove_checkpoints(run) if args.keep_best else remove_run(run)
        except UserError as error:
            failed.append(str(error))
    lines = [f"freed {format_bytes(sum(freed.values()))}"] if freed else []
    print_result(args, lines, _removal(freed, sum(freed.values())))
    if failed:
        raise UserError("\n".join(failed))
    return 0


def _removal(sizes: dict[Path, int], freed: int) -> dict[str, Any]:
    return {"removed": [str(path) for path in sizes], "freed_bytes": freed}


def _selected(args: Namespace) -> list[RunDirectory]:
    """Return the runs to remove.

    A named run that cannot be removed raises UserError before any is; others are left out with a note.
    """
    from qfleet.core.errors import UserError
    from qfleet.runs.removal import has_best, require_removable

    if not args.words and not args.failed and args.older_than is None:
        raise UserError("name the runs to remove, or select them with --failed or --older-than 7d")
    problems: list[str] = []
    chosen: list[RunDirectory] = []
    for run in _candidates(args, problems):
        try:
            require_removable(run)
        except UserError as error:
            problems.append(str(error))
            continue
        if args.keep_best and not has_best(run):
            problems.append(f"{run.path} has no best policy to keep: name it without --keep-best")
            continue
        chosen.append(run)
    if problems and args.words:
        raise UserError("\n".join(problems))
    for problem in problems:
        print_error(f"skipped: {problem}")
    return chosen


def _candidates(args: Namespace, problems: list[str]) -> list[RunDirectory]:
    """Return the named runs, or all, that match the options."""
    from qfleet.core.errors import UserError
    from qfleet.runs.directory import RunDirectory
    from qfleet.runs.listing import scan_runs, summarise

    if args.words:
        runs: dict[Path, RunDirectory] = {}
        for word in args.words:
            try:
                run = RunDirectory.open(word, args.root)
                runs.setdefault(run.path.absolute(), run)
            except UserError as error:
                problems.append(str(error))
        found = list(runs.values())
        if not args.failed and args.older_than is None:
            return found
        summaries = []
        for run in found:
            try:
                summaries.append(summarise(run))
            except (UserError, OSError) as error:
                why = error.strerror if isinstance(error, OSError) else error
                problems.append(f"the state of {run.path} cannot be read ({why}): name it without further options")
    else:
        summaries, notes = scan_runs(args.root)
        problems += notes
    return [RunDirectory(run.path) for run in summaries if _matches(run, args)]


def _matches(run: RunSummary, args: Namespace) -> bool:
    old = args.older_than is None or time.time() - run.active > args.older_than
    return old and (not args.failed or run.state in ("failed", "crashed"))


def _require_terminal() -> None:
    from qfleet.core.errors import UserError

    if sys.stdin is None or not sys.stdin.isatty():
        raise UserError("rm asks before it removes anything, and there is no terminal: pass --yes, or look first with "
                        "--dry-run")


def _confirmed(question: str) -> bool:
    print_error(question)
    return sys.stdin.readline().strip().casefold() in ("y", "yes")
