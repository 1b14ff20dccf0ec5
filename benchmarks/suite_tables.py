"""The records of suite.py as a ranking and as the table of docs/results.md."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from suite_cells import tasks
from tables import markdown

Record = dict[str, Any]
COLUMNS = {"default": "qfleet default", "recipe": "qfleet recipe", "sb3": "SB3 default", "sb3-zoo": "SB3 tuned"}


def read(path: Path) -> list[Record]:
    """All records of a file; a line that was cut off does not count."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


@dataclass(frozen=True)
class Group:
    """The seeds of a contender at a task, with the newest settings."""

    task: str
    contender: str
    runs: tuple[Record, ...]
    """One record for each seed, trained or failed."""

    @property
    def seeds(self) -> str:
        return f"{len(self.runs)} seed{'s' * (len(self.runs) > 1)}"

    @property
    def done(self) -> list[Record]:
        return [run for run in self.runs if run["status"] == "done"]

    @property
    def machines(self) -> set[str]:
        """Processors on which the seeds were trained, if they are known."""
        return {run["machine"]["cpu"] for run in self.done if "cpu" in run.get("machine", {})}

    @property
    def judged(self) -> bool:
        """True if the task has a threshold."""
        return self.runs[0]["settings"]["threshold"] is not None

    @property
    def solved(self) -> int:
        return sum(run["solved"] is True for run in self.done)

    @property
    def share(self) -> float:
        return self.solved / len(self.runs)

    def median(self, name: str) -> float:
        return statistics.median(run[name] for run in self.done)

    @property
    def steps(self) -> float | None:
        """Median steps of the solved seeds until an evaluation reached the threshold, at the latest the end."""
        steps = [run["reached_at"] or run["steps"] for run in self.done if run["solved"]]
        return statistics.median(steps) if steps else None

    @property
    def effort(self) -> float:
        """Mean share of its steps that a seed took to the threshold: 1 where it did not reach it."""
        shares = [(run["reached_at"] or run["steps"]) / run["settings"]["total_steps"] for run in self.done
                  if run["solved"]]
        return (sum(shares) + len(self.runs) - len(shares)) / len(self.runs)


def groups(records: Iterable[Record]) -> dict[tuple[str, str], Group]:
    """Records by task and contender: the last ones of each seed, with the settings of the newest record.

    A trained record is preferred to a failed one of the same seed.
    """
    found: dict[tuple[str, str], dict[str, dict[int, Record]]] = {}
    for record in records:
        if "seed" not in record or record["status"] not in ("done", "failed"):
            continue
        by_digest = found.setdefault((record["task"], record["contender"]), {})
        runs = by_digest.pop(record["settings"]["digest"], {})  # and again at the end, as the newest
        if record["status"] == "done" or runs.get(record["seed"], {}).get("status") != "done":
            runs[record["seed"]] = record
        by_digest[record["settings"]["digest"]] = runs
    return {key: Group(*key, tuple(runs for _, runs in sorted(list(each.values())[-1].items())))
            for key, each in found.items()}


def in_order(names: Iterable[str]) -> list[str]:
    """Each task once, in the order of the suite."""
    found, suite = list(dict.fromkeys(names)), list(tasks())
    return sorted(found, key=lambda name: suite.index(name) if name in suite else len(suite))


def ranking(records: Sequence[Record], chosen: Sequence[str] | None = None) -> str:
    """Every contender at every task, and their order over the tasks that all of them were trained at."""
    found = groups(records)
    names = in_order(task for task, _ in found)
    contenders = list(chosen or dict.fromkeys(contender for _, contender in found))
    lines = [padded(["task", *contenders])]
    lines += [padded([name, *(cell(found.get((name, each))) for each in contenders)]) for name in names]
    common = [name for name in names if all((name, each) in found for each in contenders)
              and found[name, contenders[0]].judged]
    reasons = {(record["task"], record["contender"]): record["reason"] for record in records
               if record["status"] in ("absent", "failed")}
    without = [f"{task}, {each}: {reason}" for (task, each), reason in reasons.items()
               if each in contenders and (task, each) not in found]
    lines += ["", "not trained:", *without] if without else []
    if not common:
        return "\n".join([*lines, "", "no task with a threshold has all contenders: there is no ranking"])
    order = sorted(contenders, key=lambda each: place(each, common, found))
    lines += ["", f"on the tasks that all of them were trained at: {', '.join(common)}"]
    for number, each in enumerate(order, 1):
        unsolved, effort = place(each, common, found)
        lines.append(f"{number}. {each}: {-unsolved:.0%} of the seeds solved, {effort:.0%} of the steps used")
    return "\n".join(lines)


def place(contender: str, names: Sequence[str], found: dict[tuple[str, str], Group]) -> tuple[float, float]:
    """What contenders are sorted by: solved share, most first, then steps; each task counts the same."""
    rows = [found[name, contender] for name in names]
    return (-statistics.fmean(group.share for group in rows), statistics.fmean(group.effort for group in rows))


def padded(cells: Sequence[str]) -> str:
    return "  ".join(f"{text:<28}" for text in cells).rstrip()


def cell(group: Group | None) -> str:
    if group is None:
        return "-"
    if not group.done:
        return f"0 of {len(group.runs)}: failed"
    score = f"{short(group.median('score'))}"
    if not group.judged:
        return f"{score} ({group.seeds})"
    steps = f", {group.steps:,.0f} steps" if group.steps else ""
    return f"{group.solved} of {len(group.runs)}, {score}{steps}"


def table(records: Sequence[Record]) -> str:
    """The table of the documentation: Markdown with a row for each task."""
    return markdown(rows(records))


def rows(records: Sequence[Record]) -> Iterator[Sequence[str]]:
    """Header and rows of the table: solved seeds, median score and median CPU time of each contender."""
    found = groups(records)
    missing = {"absent": "–", "failed": "failed"}
    without = {(record["task"], record["contender"]): missing[record["status"]] for record in records
               if record["status"] in missing}
    yield "task", "steps", "threshold", *COLUMNS.values()
    for name in in_order(task for task, contender in found if contender in COLUMNS):
        shown = {contender: found.get((name, contender)) for contender in COLUMNS}
        present = [group for group in shown.values() if group]
        yield name, *facts(present), *(
            entry(group, present[0].machines) if group else without.get((name, contender), "not run")
            for contender, group in shown.items())


def facts(shown: Sequence[Group]) -> tuple[str, str]:
    """Steps and threshold of a task, as its records have them."""
    steps = sorted({run["settings"]["total_steps"] for group in shown for run in group.runs})
    thresholds = {run["settings"]["threshold"] for group in shown for run in group.runs} - {None}
    return ", ".join(f"{each:,}" for each in steps), ", ".join(short(each) for each in thresholds) or "–"


def entry(group: Group, machines: set[str]) -> str:
    """A cell of the table: solved seeds, in bold if all are solved, median score, median CPU time.

    Times are comparable on the same `machines` only; others are left out.
    """
    if not group.done:
        return f"0/{len(group.runs)}, failed"
    solved = f"{group.solved}/{len(group.runs)}"
    mark = "**" if group.solved == len(group.runs) else ""
    first = f"{mark}{solved}{mark}" if group.judged else group.seeds
    time = [duration(group.median("cpu_s"))] if group.machines == machines else []
    return ", ".join([first, short(group.median("score")), *time])


def duration(seconds: float) -> str:
    """Seconds or minutes, which are not broken over two lines."""
    text = f"{seconds:,.0f} s" if seconds < 120 else f"{seconds / 60:,.0f} min"
    return text.replace(" ", "\N{NO-BREAK SPACE}")


def short(value: float) -> str:
    """A score with about three digits and a typographic minus."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    text = f"{value:,.{digits}f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text).replace("-", "−")
