"""Checkpoints of several ranks: one of a single process, and the parts of the others beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from qfleet.core.replay import Segment
from qfleet.runs.checkpoint import Checkpoint
from qfleet.runs.checkpoint_parts import StagingArea, pack_state, unpack_state
from qfleet.sync.process_group import ProcessGroup
from qfleet.training.checkpointer import Snapshot
from qfleet.training.replica import PER_RANK_KEYS, RankSync, rank_segment_name


class ShardedCheckpointWriter:
    """Checkpoints of all ranks together: each writes its replay, the first collects their state and seals."""

    def __init__(self, peers: ProcessGroup, folder: Path, checkpoint: Checkpoint | None) -> None:
        self.peers, self.folder = peers, folder
        self.stage = StagingArea(folder, peers.rank)
        if checkpoint is not None:
            self.stage.saved_names = {name for name, _ in checkpoint.segments()}
        self.rank_sync: RankSync | None = None

    def saver(self, write: Callable[[Snapshot], Any]) -> Callable[[Snapshot], None]:
        """How a rank saves its snapshot when all do; `write` is how the first one writes the whole."""
        return write if self.peers.size == 1 else lambda snapshot: self._save(write, snapshot)

    def _save(self, write: Callable[[Snapshot], Any], snapshot: Snapshot) -> None:
        rank = self.peers.rank
        mine = [Segment(rank_segment_name(rank, segment.name), segment.blocks) for segment in snapshot.segments]
        try:
            self._together((lambda: self.stage.write(mine)) if rank else None)
            told = self.peers.exchange(pack_state(_contribution(snapshot, mine)) if rank else b"")
            whole = self._merged(snapshot, told) if rank == 0 else snapshot
            self._together((lambda: write(whole)) if rank == 0 else None)
            self.stage.saved_names = {segment.name for segment in mine}
        except BaseException:
            self.stage.saved_names = set()  # whatever is there now, next time everything is written
            raise
        finally:
            self.stage.clear()

    def _merged(self, snapshot: Snapshot, told: Sequence[bytes]) -> Snapshot:
        parts = [unpack_state(text) for text in told[1:]]
        theirs = [StagingArea(self.folder, rank).segment(name) for rank, part in enumerate(parts, start=1)
                  for name in part["segments"]]
        return replace(snapshot, state={**snapshot.state, "ranks": [part["state"] for part in parts]},
                       segments=[*snapshot.segments, *theirs])

    def _together(self, work: Callable[[], Any] | None) -> None:
        assert self.rank_sync is not None
        if failed := self.rank_sync.run_together(work):
            raise OSError(f"rank {failed[0]} could not write its part")


def _contribution(snapshot: Snapshot, segments: Sequence[Segment]) -> dict[str, Any]:
    state = {name: snapshot.state[name] for name in PER_RANK_KEYS} | {
        "learner": {"rng": snapshot.state["learner"]["rng"]}
    }
    return {"state": state, "segments": [segment.name for segment in segments]}
