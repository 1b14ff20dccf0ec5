"""Results of a training as files on disk, read without qfleet, and their comparison bit by bit.

Arrays: the policy and every array of the state in the newest full checkpoint, by place (`learner/target/head.q.bias`).
Metrics: the records of metrics.jsonl without timings, throughput and memory.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

Record = dict[str, Any]

NOT_COMPARED = ("time_s", "time/*", "*_ms", "*_share", "*/seconds", "wire/*", "comm/*", "replay/bytes*")
"""Timings, throughput, traffic and memory."""

TOTALS = ("step", "frames", "episodes", "rollout/ep_*", "replay/*", "fault/*")
"""Tags whose last value is reproducible even if the steps at which records are made are not. The last updates may come
after the last record; the checkpoint says how many there were."""

LEAST_UPDATES = 50
SHOWN = 8
"""Differences that are printed per run."""

DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U64": "<u8",
          "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?"}
"""NumPy's names for those of safetensors; other types are shown as unsigned integers."""


class Incomplete(Exception):
    """A result that cannot be compared: a file is missing, or the training was too short to show anything."""


@dataclass(frozen=True)
class Rule:
    """What of a run is reproducible.

    With `evaluations=False` the evaluator is a process: its records are not compared. With `records=False` the steps
    at which records are made depend on timing: the set of tags and the last values of `TOTALS` are compared.
    """

    evaluations: bool = True
    records: bool = True


@dataclass(frozen=True)
class Names:
    """How a tree's names differ from those of the comparison: exact renames, and names that are left out.

    For arrays a rename applies to whole parts of a place, between slashes or dots; `left_out` holds patterns.
    """

    renamed: Mapping[str, str] = field(default_factory=dict)
    left_out: Sequence[str] = ()

    def tag(self, name: str) -> str | None:
        return None if _matches(name, self.left_out) else self.renamed.get(name, name)

    def place(self, name: str) -> str | None:
        if _matches(name, self.left_out):
            return None
        for old, new in self.renamed.items():
            name = re.sub(rf"(?<![^/.]){re.escape(old)}(?![^/.])", new, name)
        return name


@dataclass(frozen=True)
class Array:
    """Bytes of an array with their meaning. Equality is that of bits: NaN equals itself, and 0 is not -0."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def difference(self, other: Array) -> str | None:
        """Where and how two arrays differ; None if they are equal."""
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            return f"{self.dtype} {list(self.shape)} in BASE, {other.dtype} {list(other.shape)} now"
        if self.data == other.data:
            return None
        a, b = (np.frombuffer(array.data, np.uint8).reshape(-1, self.itemsize) for array in (self, other))
        unequal = np.flatnonzero((a != b).any(axis=1))
        first = int(unequal[0])
        index = [int(i) for i in np.unravel_index(first, self.shape)] if self.shape else []
        return (f"{len(unequal)} of {len(a)} elements differ, first {index}: {self.element(first)} in BASE, "
                f"{other.element(first)} now")

    @property
    def itemsize(self) -> int:
        return len(self.data) // max(1, int(np.prod(self.shape, dtype=np.int64)))

    def element(self, index: int) -> str:
        dtype = np.dtype(DTYPES.get(self.dtype, f"<u{self.itemsize}"))
        return str(np.frombuffer(self.data, dtype)[index].item())  # of float32 as float64, so that every bit shows


@dataclass(frozen=True)
class Result:
    """Outcome of a training; `step` and `updates` are those of the checkpoint that the arrays are from."""

    step: int
    updates: int
    arrays: dict[str, Array]
    records: list[Record]


def read_result(run: Path, tags: Names, arrays: Names) -> Result:
    """Read a run directory, with names as they are compared."""
    checkpoints = sorted(run.glob("checkpoints/step-*"))
    if len(checkpoints) < 2:
        raise Incomplete(f"{len(checkpoints)} full checkpoints, at least 2 are needed")
    first, last = checkpoints[0], checkpoints[-1]
    if (first / "policy.safetensors").read_bytes() == (last / "policy.safetensors").read_bytes():
        raise Incomplete(f"the weights are the same at {first.name} and {last.name}")
    manifest = json.loads((last / "manifest.json").read_text())
    if manifest["updates"] < LEAST_UPDATES:
        raise Incomplete(f"{manifest['updates']} updates, at least {LEAST_UPDATES} are needed")
    found = {renamed: array for place, array in read_arrays(last) if (renamed := arrays.place(place)) is not None}
    return Result(manifest["step"], manifest["updates"], found, read_records(run / "metrics.jsonl", tags))


def read_records(path: Path, tags: Names) -> list[Record]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for tag, value in line.items()
             if (name := tags.tag(tag)) is not None and not _matches(name, NOT_COMPARED)} for line in lines]


def read_arrays(checkpoint: Path) -> Iterator[tuple[str, Array]]:
    """Place and content of every array of a full checkpoint; the state refers to arrays of the policy by their name."""
    policy = read_safetensors(checkpoint / "policy.safetensors")
    yield from ((f"policy/{name}", array) for name, array in policy.items())
    stored = read_safetensors(checkpoint / "state.safetensors") | {f"policy:{name}": a for name, a in policy.items()}
    for place, name in _references(json.loads((checkpoint / "state.json").read_text()), ""):
        yield place, stored[name]


def read_safetensors(path: Path) -> dict[str, Array]:
    """The format: length of a JSON header, the header, the bytes of all tensors."""
    content = path.read_bytes()
    start = 8 + struct.unpack_from("<Q", content)[0]
    header = json.loads(content[8:start])
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        found[name] = Array(entry["dtype"], tuple(entry["shape"]), content[start + begin:start + end])
    return found


def differences(base: Result, now: Result, rule: Rule) -> list[str]:
    """One line per tag and array that differs; none if the results are equal."""
    found = _of_records(base.records, now.records, rule)
    if (base.step, base.updates) != (now.step, now.updates):
        found.append(f"last checkpoint: step {base.step}, {base.updates} updates in BASE, "
                     f"step {now.step}, {now.updates} updates now")
    for place in base.arrays | now.arrays:
        a, b = base.arrays.get(place), now.arrays.get(place)
        why = f"only {'now' if a is None else 'in BASE'}" if a is None or b is None else a.difference(b)
        if why is not None:
            found.append(f"{place} at step {now.step if a is None else base.step}: {why}")
    return found


def _of_records(base: list[Record], now: list[Record], rule: Rule) -> list[str]:
    if not rule.records:
        return _of_totals(base, now, () if rule.evaluations else ("eval/*",))
    if not rule.evaluations:
        base, now = _without_evaluations(base), _without_evaluations(now)
    found: dict[str, str] = {}
    for a, b in zip(base, now, strict=False):
        for tag in a | b:
            if not _same(a, b, tag):
                found.setdefault(tag, f"{tag} at step {a['step']}: {_shown(a, tag)} in BASE, {_shown(b, tag)} now")
    if len(base) != len(now):
        found["records"] = f"metrics.jsonl: {len(base)} records in BASE, {len(now)} now"
    return list(found.values())


def _of_totals(base: list[Record], now: list[Record], left_out: Sequence[str]) -> list[str]:
    a, b = _last_values(base), _last_values(now)
    tags = [tag for tag in a | b if not _matches(tag, left_out)]
    return [f"{tag} at the end: {_shown(a, tag)} in BASE, {_shown(b, tag)} now" for tag in tags
            if (not _same(a, b, tag) if _matches(tag, TOTALS) else (tag in a) != (tag in b))]


def _last_values(records: list[Record]) -> Record:
    values: Record = {}
    for record in records:
        values |= record
    return values


def _without_evaluations(records: list[Record]) -> list[Record]:
    return [record for record in records if not any(tag.startswith("eval/") for tag in record)]


def _same(a: Record, b: Record, tag: str) -> bool:
    """JSON keeps every bit of a float, and repr tells 0.0 from -0.0 and from 0."""
    return tag in a and tag in b and repr(a[tag]) == repr(b[tag])


def _shown(record: Record, tag: str) -> str:
    return repr(record[tag]) if tag in record else "missing"


def _references(node: Any, place: str) -> Iterator[tuple[str, str]]:
    """Place and name of every array that the JSON of a state refers to."""
    if isinstance(node, list):
        node = dict(enumerate(node))
    if not isinstance(node, dict):
        return
    for key, value in node.items():
        if key in ("$tensor", "$array", "$scalar"):
            yield place, value
        elif key == "$items":
            yield from _references(dict(value), place)
        else:
            yield from _references(value, place if key == "$tuple" else f"{place}/{key}".lstrip("/"))


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
