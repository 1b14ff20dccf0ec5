"""Checkpoints of several ranks: one of a single process, and the parts of the others beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from qfleet.roles.checkpointer import Snapshot
from qfleet.runs.checkpoint import Checkpoint
from qfleet.runs.parts import Stage, pack_state, unpack_state
from qfleet.runtime.rank import OWN, Council, part_name
from qfleet.runtime.ranks import Crew
from qfleet.types import Segment


class Archive:
    """Checkpoints of all ranks together: each writes its replay, the first collects their state and seals."""

    def __init__(self, peers: Crew, folder: Path, checkpoint: Checkpoint | None) -> None:
        self.peers, self.folder = peers, folder
        self.stage = Stage(folder, peers.rank)
        if checkpoint is not None:
            self.stage.kept = {name for name, _ in checkpoint.segments()}
        self.council: Council | None = None

    def saver(self, write: Callable[[Snapshot], Any]) -> Callable[[Snapshot], None]:
        """How a rank saves its snapshot when all do; `write` is how the first one writes the whole."""
        return write if self.peers.size == 1 else lambda snapshot: self._save(write, snapshot)

    def _save(self, write: Callable[[Snapshot], Any], snapshot: Snapshot) -> None:
        rank = self.peers.rank
        mine = [Segment(part_name(rank, segment.name), segment.blocks) for segment in snapshot.segments]
        try:
            self._together((lambda: self.stage.write(mine)) if rank else None)
            told = self.peers.exchange(pack_state(_contribution(snapshot, mine)) if rank else b"")
            whole = self._merged(snapshot, told) if rank == 0 else snapshot
            self._together((lambda: write(whole)) if rank == 0 else None)
            self.stage.kept = {segment.name for segment in mine}
        except BaseException:
            self.stage.kept = set()  # whatever is there now, next time everything is written
            raise
        finally:
            self.stage.clear()

    def _merged(self, snapshot: Snapshot, told: Sequence[bytes]) -> Snapshot:
        parts = [unpack_state(text) for text in told[1:]]
        theirs = [Stage(self.folder, rank).segment(name) for rank, part in enumerate(parts, start=1)
                  for name in part["segments"]]
        return replace(snapshot, state={**snapshot.state, "ranks": [part["state"] for part in parts]},
                       segments=[*snapshot.segments, *theirs])

    def _together(self, work: Callable[[], Any] | None) -> None:
        assert self.council is not None
        if failed := self.council.together(work):
            raise OSError(f"rank {failed[0]} could not write its part")


def _contribution(snapshot: Snapshot, segments: Sequence[Segment]) -> dict[str, Any]:
    state = {name: snapshot.state[name] for name in OWN} | {"learner": {"rng": snapshot.state["learner"]["rng"]}}
    return {"state": state, "segments": [segment.name for segment in segments]}
