"""A replay that was kept in several parts, dealt anew to another number of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from qfleet.replay.segments import SegmentSource, read_segments
from qfleet.replay.store import ReplayStore

SavedReplay = tuple[Mapping[str, Any], Iterable[tuple[str, SegmentSource]]]
"""The saved state of a part, and its segments."""


def redistribute(replay: ReplayStore[Any], shards: Sequence[SavedReplay], rank: int, ranks: int, steps: int) -> None:
    """Fill an empty replay with its share, part `rank` of `ranks`: every so-manieth chunk, oldest first.

    Chunks of all shards are dealt in the order of their age, counted from each shard's newest. `steps` of the run's
    clock are this part's; samples drawn are divided evenly, and the ratio of both holds from now on.
    """
    ages = sorted((int(state["next"]) - serial, index, serial) for index, (state, _) in enumerate(shards)
                  for serial in range(int(state["first"]), int(state["next"])))
    mine = {(index, serial) for _, index, serial in list(reversed(ages))[rank::ranks]}
    found = {}
    for index, (state, pieces) in enumerate(shards):
        starts = replay.layout.starts
        leaves = np.asarray(state["leaves"], np.float64).reshape(-1, starts)
        for serial, packed in read_segments(pieces, replay.layout):
            if (index, serial) in mine:
                found[int(state["next"]) - serial, index] = packed, leaves[serial - int(state["first"])]
    if len(found) != len(mine):
        raise ValueError(f"saved replay: {len(mine) - len(found)} chunks are missing")
    for key in sorted(found, reverse=True):
        packed, leaves = found[key]
        replay.add_packed(packed, replay.priority_of(leaves))
    opened = any(state["pace"]["origin"] is not None for state, _ in shards)
    replay.rate_limiter.resume_share(steps, sum(int(state["pace"]["samples"]) for state, _ in shards) // ranks, opened)
