"""The records of a run as columns that a page can draw: few enough points, whatever the run's length."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from qfleet.report.bottleneck import RECENT_RECORDS, find_bottleneck
from qfleet.report.plots import AXES
from qfleet.runs.metric_writers import is_number

Record = Mapping[str, Any]

MOST_POINTS, MOST_VERDICTS = 500, 100
CLOCKS = {field for field, _ in AXES.values()}


def columns(records: Sequence[Record], most: int = MOST_POINTS) -> dict[str, Any]:
    """`{"x": {axis: [P]}, "y": {tag: [P]}, "limits": [P], "each": K}`: a point is the mean of at most K records.

    None stands for a figure that was not logged. `limits` says what limited the run at that time.
    """
    merged = _by_step(records)
    each = max(1, math.ceil(len(merged) / most))
    places = [range(start, min(start + each, len(merged))) for start in range(0, len(merged), each)]
    points = [_mean([merged[place] for place in some]) for some in places]
    tags = sorted({tag for point in points for tag in point if "/" in tag})
    return {"x": {axis: [_short(point.get(field)) for point in points] for axis, (field, _) in AXES.items()},
            "y": {tag: [_short(point.get(tag)) for point in points] for tag in tags},
            "limits": _limits(merged, [some.stop for some in places]), "each": each}


class DownsampledRecords:
    """The records of a run that goes on, never more than a few: in the end each is the mean of as many as it takes."""

    def __init__(self, most: int = 2 * MOST_POINTS) -> None:
        self.most, self.each = most, 1
        self._means: list[Record] = []
        self._fresh: list[Record] = []

    def add(self, record: Record) -> None:
        """Take one in. A run that went on from a checkpoint is behind what was seen: that has not happened."""
        step = record.get("step", 0)
        for kept in (self._means, self._fresh):
            while kept and kept[-1].get("step", 0) > step:
                kept.pop()
        self._fresh.append(record)
        if len(self._fresh) >= 2 * self.each:  # two at least: an evaluation belongs to the record before it
            self._means += self._packed(self._fresh[:-1])
            self._fresh = self._fresh[-1:]
        if len(self._means) > self.most:
            self.each *= 2
            self._means = [_mean(self._means[place:place + 2]) for place in range(0, len(self._means), 2)]

    def _packed(self, records: Sequence[Record]) -> list[Record]:
        merged = _by_step(records)
        return [_mean(merged)] if self.each > 1 else list(merged)

    def __len__(self) -> int:
        return len(self._means) + len(self._fresh)

    @property
    def records(self) -> list[Record]:
        return [*self._means, *self._fresh]


def evaluations(records: Iterable[Record]) -> list[tuple[float, float]]:
    """(step, mean return) of every evaluation; of two at one step the later counts."""
    found = {float(record["step"]): float(record["eval/mean_reward"]) for record in records
             if record.get("eval/mean_reward") is not None and "step" in record}
    return sorted(found.items())


def _limits(records: Sequence[Record], ends: Sequence[int]) -> list[str | None]:
    """What limited the run up to each of these records; where there are many, neighbours share a verdict."""
    stride = max(1, math.ceil(len(ends) / MOST_VERDICTS))
    found: list[str | None] = []
    for place in range(0, len(ends), stride):
        end = ends[min(place + stride, len(ends)) - 1]
        verdict = find_bottleneck(records[max(0, end - RECENT_RECORDS):end])
        found += [None if verdict is None else verdict.limit] * min(stride, len(ends) - place)
    return found


def _by_step(records: Iterable[Record]) -> list[dict[str, Any]]:
    """One record for each step. That of an evaluation repeats figures that say nothing new: it only adds its own."""
    merged: list[dict[str, Any]] = []
    for record in records:
        known = {tag: value for tag, value in record.items() if is_number(value)}
        if merged and merged[-1].get("step") == known.get("step"):
            judged = {tag: value for tag, value in known.items() if tag.startswith("eval/")}
            merged[-1] = {**known, **merged[-1], **judged}
        else:
            merged.append(known)
    return merged


def _mean(records: Sequence[Record]) -> dict[str, float]:
    """Clocks as they stand at the end, the mean of all else."""
    values: dict[str, list[float]] = {}
    for record in records:
        for tag, value in record.items():
            values.setdefault(tag, []).append(value)
    return {tag: found[-1] if tag in CLOCKS else sum(found) / len(found) for tag, found in values.items()}


def _short(value: float | None) -> float | None:
    """Six digits are more than a screen can show."""
    if value is None or not math.isfinite(value):
        return None
    return int(value) if value == int(value) and abs(value) < 2**53 else float(f"{value:.6g}")
