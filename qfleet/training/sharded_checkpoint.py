"""Checkpoints of an allreduce run: the checkpoint of rank 0, extended by the state and replay of the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from qfleet.core.replay import Segment
from qfleet.runs.checkpoint import Checkpoint
from qfleet.runs.checkpoint_parts import StagingArea, pack_state, unpack_state
from qfleet.training.checkpointer import Snapshot
from qfleet.training.learner_part import learner_part, segment_name
from qfleet.training.rank_run import RankConsensus


class ShardedCheckpointWriter:
    """Writes a checkpoint of all ranks: each rank stages its replay; rank 0 collects their state and writes it all."""

    def __init__(self, consensus: RankConsensus, folder: Path, checkpoint: Checkpoint | None) -> None:
        self.consensus, self.peers, self.folder = consensus, consensus.group, folder
        self.stage = StagingArea(folder, self.peers.rank)
        self.stage.set_saved([] if checkpoint is None else [name for name, _ in checkpoint.segments()])

    def saver(self, write: Callable[[Snapshot], Path | None]) -> Callable[[Snapshot], Path | None]:
        """Collective version of `write`: called by all ranks with their snapshots; only rank 0 calls `write`."""
        return write if self.peers.size == 1 else lambda snapshot: self._save(write, snapshot)

    def _save(self, write: Callable[[Snapshot], Path | None], snapshot: Snapshot) -> Path | None:
        rank = self.peers.rank
        written: list[Path | None] = []
        segments = [Segment(segment_name(rank, segment.name), segment.blocks) for segment in snapshot.segments]
        try:
            self._run_together((lambda: self.stage.write(segments)) if rank else None)
            part = {"state": learner_part(snapshot.state), "segments": [segment.name for segment in segments]}
            packed = self.peers.exchange(pack_state(part) if rank else b"")
            combined = self._merge(snapshot, packed) if rank == 0 else snapshot
            self._run_together((lambda: written.append(write(combined))) if rank == 0 else None)
            self.stage.set_saved(segment.name for segment in segments)
        except BaseException:
            self.stage.set_saved([])  # unknown which files exist: write all segments next time
            raise
        finally:
            self.stage.clear()
        return written[0] if written else None

    def _merge(self, snapshot: Snapshot, packed: Sequence[bytes]) -> Snapshot:
        parts = [unpack_state(data) for data in packed[1:]]
        staged = [StagingArea(self.folder, rank).segment(name) for rank, part in enumerate(parts, start=1)
                  for name in part["segments"]]
        return replace(snapshot, state={**snapshot.state, "ranks": [part["state"] for part in parts]},
                       segments=[*snapshot.segments, *staged])

    def _run_together(self, work: Callable[[], Any] | None) -> None:
        if failed := self.consensus.run_together(work):
            raise OSError(f"rank {failed[0]} could not write its part of the checkpoint")
