"""A learner's part of a checkpoint: the state that each of several learners saves and restores for itself.

A learner is a rank of an allreduce run or a worker of a parameter server. The first one's part is in the state of the
checkpoint itself, together with what all share; the parts of the others are its list `ranks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from qfleet.replay.redistribute import redistribute
from qfleet.training.learner_core import LearnerCore
from qfleet.transport.registry import merge_registries

PART_KEYS = ("actors", "replay", "clock", "torch_rng", "begin", "actor_registry")
"""State that each learner saves for itself, as far as it has it, in addition to the random generator of its updates.
The rest is identical everywhere or belongs to the first one."""

SEGMENT_PREFIX = "rank"

Restore = Callable[[Mapping[str, Any], Iterable[tuple[str, Path]]], None]


def learner_part(state: Mapping[str, Any], of_updates: Iterable[str] = ("rng",)) -> dict[str, Any]:
    """The part of one learner in the state of a run; `of_updates` are the keys of the section `learner` in it."""
    part = {name: state[name] for name in PART_KEYS if name in state}
    updates = {name: state["learner"][name] for name in of_updates if name in state.get("learner", {})}
    return part | ({"learner": updates} if updates else {})


def learner_parts(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The parts of all learners in a checkpoint, by their index."""
    return [dict(state), *state.get("ranks", [])]


def saved_steps(state: Mapping[str, Any]) -> int:
    """Environment steps of the run. After the loss of a worker these exceed the sum over the saved parts."""
    return int(state.get("steps", sum(part["clock"]["steps"] for part in learner_parts(state))))


def restore_learner(
    core: LearnerCore, restore: Restore, state: Mapping[str, Any], segments: Iterable[tuple[str, Path]], index: int,
    size: int, total_steps: int | None = None) -> None:
    """Restore one of `size` learners from a checkpoint of any number of learners, by the `restore` of its run.

    With the same number it restores its own part, otherwise a share of the replay of all parts. `total_steps`: steps
    of the run, if it has continued since the checkpoint; what others have added meanwhile is not shared.
    """
    parts, part_segments, replay = learner_parts(state), segments_by_learner(segments), core.replay
    total = saved_steps(state) if total_steps is None else total_steps
    if len(parts) == size:
        own = {**state, **parts[index]}
        own["learner"] = {**state["learner"], **parts[index].get("learner", {})}
        core.clock.set_remote_steps(total - own["clock"]["steps"])
        restore(own, part_segments.get(index, []))
        return
    saved = saved_steps(state)
    steps = saved // size + (index < saved % size)
    core.clock.set_remote_steps(total - steps)
    min_steps = replay.rate_limiter.min_steps
    members = merge_registries(part["actor_registry"] for part in parts if "actor_registry" in part)
    restore({**state, "replay": None, "actors": [], "clock": {"steps": steps}, "actor_registry": members}, [])
    shards = [(part["replay"], part_segments.get(owner, []))
              for owner, part in enumerate(parts) if part["replay"] is not None]
    if shards:
        replay.rate_limiter.end_warmup_at(min_steps)  # the replay is not empty: no second warm-up
        redistribute(replay, shards, index, size, steps)


def segment_name(index: int, name: str) -> str:
    """Name of a learner's replay segment in the common checkpoint; segments of the first one keep their names."""
    return name if index == 0 else f"{SEGMENT_PREFIX}{index:04d}-{name}"


def segments_by_learner(segments: Iterable[tuple[str, Path]]) -> dict[int, list[tuple[str, Path]]]:
    """Group the segments of a checkpoint by learner; inverse of `segment_name`."""
    found: dict[int, list[tuple[str, Path]]] = {}
    for name, path in segments:
        index, base = 0, name
        if name.startswith(SEGMENT_PREFIX):
            number, _, base = name.removeprefix(SEGMENT_PREFIX).partition("-")
            index = int(number)
        found.setdefault(index, []).append((base, path))
    return found
