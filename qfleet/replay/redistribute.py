"""Redistribution of a saved replay to another number of learners."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from qfleet.replay.segments import SegmentSource, read_segments
from qfleet.replay.store import ReplayStore

SavedReplay = tuple[Mapping[str, Any], Iterable[tuple[str, SegmentSource]]]
"""Saved state of one shard, and its segments."""


def redistribute(replay: ReplayStore[Any], shards: Sequence[SavedReplay], rank: int, ranks: int, steps: int) -> None:
    """Fill the empty replay of `rank` with every `ranks`-th chunk of all shards, oldest first.

    Chunks are ordered by age, counted from the newest chunk of each shard. `steps` are the local steps of this rank;
    the sample counts are divided evenly, and the budget of the rate limiter starts from there.
    """
    ages = sorted((int(state["next"]) - serial, index, serial) for index, (state, _) in enumerate(shards)
                  for serial in range(int(state["first"]), int(state["next"])))
    selected = {(index, serial) for _, index, serial in list(reversed(ages))[rank::ranks]}
    found = {}
    for index, (state, segments) in enumerate(shards):
        starts = replay.layout.starts
        leaves = np.asarray(state["leaves"], np.float64).reshape(-1, starts)
        for serial, packed in read_segments(segments, replay.layout):
            if (index, serial) in selected:
                found[int(state["next"]) - serial, index] = packed, leaves[serial - int(state["first"])]
    if len(found) != len(selected):
        raise ValueError(f"saved replay: {len(selected) - len(found)} chunks are missing")
    for key in sorted(found, reverse=True):
        packed, leaves = found[key]
        replay.add_packed(packed, replay.priority_of(leaves))
    counting = any(state["pace"]["origin"] is not None for state, _ in shards)
    samples = sum(int(state["pace"]["samples"]) for state, _ in shards)
    replay.rate_limiter.resume_share(steps, samples // ranks, counting)
