"""Metric records as columns for a page, with a bounded number of points for a run of any length."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from qfleet.report.bottleneck import RECENT_RECORDS, find_bottleneck
from qfleet.report.plots import AXES
from qfleet.runs.metric_writers import is_number

Record = Mapping[str, Any]

MAX_POINTS, MAX_BOTTLENECKS = 500, 100
CLOCKS = {field for field, _ in AXES.values()}


def columns(records: Sequence[Record], most: int = MAX_POINTS) -> dict[str, Any]:
    """Return `{"x": {axis: [P]}, "y": {tag: [P]}, "limits": [P], "each": K}`: a point averages up to K records.

    None stands for a metric that was not logged. `limits` holds the bottleneck at each point.
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
    """Records of a growing run in bounded memory: neighbours are averaged when there are more than `most`."""

    def __init__(self, most: int = 2 * MAX_POINTS) -> None:
        self.most, self.each = most, 1
        self._means: list[Record] = []
        self._fresh: list[Record] = []

    def add(self, record: Record) -> None:
        """Add a record. Records beyond its step are dropped: the run was resumed from an earlier checkpoint."""
        step = record.get("step", 0)
        for kept in (self._means, self._fresh):
            while kept and kept[-1].get("step", 0) > step:
                kept.pop()
        self._fresh.append(record)
        if len(self._fresh) >= 2 * self.each:  # at least two: an evaluation belongs to the previous record
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
    """Return (step, mean return) of every evaluation; of two at one step the later one counts."""
    found = {float(record["step"]): float(record["eval/mean_reward"]) for record in records
             if record.get("eval/mean_reward") is not None and "step" in record}
    return sorted(found.items())


def _limits(records: Sequence[Record], ends: Sequence[int]) -> list[str | None]:
    """Bottleneck of the run up to each of these records; if there are many, neighbours share one."""
    stride = max(1, math.ceil(len(ends) / MAX_BOTTLENECKS))
    found: list[str | None] = []
    for place in range(0, len(ends), stride):
        end = ends[min(place + stride, len(ends)) - 1]
        bottleneck = find_bottleneck(records[max(0, end - RECENT_RECORDS):end])
        found += [None if bottleneck is None else bottleneck.limit] * min(stride, len(ends) - place)
    return found


def _by_step(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Merge the records of each step. Of an evaluation's record only its own metrics count: the others repeat."""
    merged: list[dict[str, Any]] = []
    for record in records:
        known = {tag: value for tag, value in record.items() if is_number(value)}
        if merged and merged[-1].get("step") == known.get("step"):
            evaluated = {tag: value for tag, value in known.items() if tag.startswith("eval/")}
            merged[-1] = {**known, **merged[-1], **evaluated}
        else:
            merged.append(known)
    return merged


def _mean(records: Sequence[Record]) -> dict[str, float]:
    """Average records: counters take their last value, metrics their mean."""
    values: dict[str, list[float]] = {}
    for record in records:
        for tag, value in record.items():
            values.setdefault(tag, []).append(value)
    return {tag: found[-1] if tag in CLOCKS else sum(found) / len(found) for tag, found in values.items()}


def _short(value: float | None) -> float | None:
    """Round to six significant digits, more than a screen can show; None for a non-finite value."""
    if value is None or not math.isfinite(value):
        return None
    return int(value) if value == int(value) and abs(value) < 2**53 else float(f"{value:.6g}")
