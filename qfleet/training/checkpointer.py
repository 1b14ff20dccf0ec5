"""Checkpoint schedule and content. The source of the snapshots writes the files."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from pydantic import Field

from qfleet.config import Config, Count, PositiveCount
from qfleet.core.clock import Progress, Schedule
from qfleet.core.metrics import Metrics
from qfleet.core.replay import Segment

log = logging.getLogger(__name__)


class CheckpointConfig(Config):
    """The checkpoint section: when checkpoints are written and what they contain."""

    period_steps: Count | None = Field(
        None, description="environment steps between checkpoints; null = only at the end of the run")
    period_updates: Count | None = Field(None, description="updates between checkpoints, instead of period_steps")
    keep: PositiveCount = Field(2, description="newest checkpoints to keep; the best policy is kept in addition")
    replay: bool = Field(
        True, description="save the replay, too; false saves disk space, but a resumed run collects replay.min_steps "
                          "again before it learns")


@dataclass(frozen=True)
class Snapshot:
    """Complete state of a run at one moment: enough to resume it."""

    progress: Progress
    policy: dict[str, torch.Tensor]
    state: dict[str, Any]
    segments: list[Segment]


class CheckpointSource(Protocol):
    """A run that can be saved."""

    def before_checkpoint(self, index: int) -> None:
        """Called before a scheduled checkpoint with its number."""

    def snapshot(self) -> Snapshot: ...
    def write(self, snapshot: Snapshot) -> Path | None:
        """Write a snapshot; returns the checkpoint's path if this process knows it."""


class CheckpointWriter:
    """Saves snapshots of a source, on schedule or at once.

    A failed write (full disk) does not end the run: the failure is counted, the previous checkpoint is kept, and the
    next one is attempted on schedule.
    """

    def __init__(self, cfg: CheckpointConfig, progress: Callable[[], Progress], metrics: Metrics) -> None:
        self.progress, self.metrics = progress, metrics
        self.schedule = Schedule(cfg.period_steps, cfg.period_updates)
        self.failed = False
        self.saved_at: Progress | None = None
        self.saved_path: Path | None = None
        self.is_scheduled = False  # the newest checkpoint: only a scheduled one can be an episode boundary
        self.requested = False

    def request(self) -> None:
        """Save at the next opportunity, in addition to the schedule."""
        self.requested = True

    def save_if_due(self, source: CheckpointSource) -> bool:
        """Save if a checkpoint is due; returns whether it was."""
        scheduled = self.schedule.due(self.progress())
        if scheduled:
            source.before_checkpoint(self.schedule.index)
        elif not self.requested:
            return False
        self.requested = False
        self.save(source, scheduled)
        return True

    def save(self, source: CheckpointSource, scheduled: bool = False) -> None:
        """Save now, unless the last checkpoint is from the same step and update."""
        if self.saved_at == self.progress():
            return
        try:
            self.saved_path = source.write(source.snapshot())
        except OSError as error:
            self.failed = True
            self.metrics.count("fault/checkpoints_failed")
            earlier = ("there is no earlier checkpoint" if self.saved_at is None
                       else f"the checkpoint of step {self.saved_at.steps} is kept")
            log.warning("the checkpoint at step %d could not be saved (%s); training continues, %s",
                        self.progress().steps, error, earlier)
            return
        self.failed = False
        self.saved_at, self.is_scheduled = self.progress(), scheduled

    def resume(self, was_scheduled: bool = False) -> None:
        """Continue the schedule after a checkpoint was loaded."""
        self.schedule.resume(self.progress())
        self.saved_at, self.is_scheduled = self.progress(), was_scheduled


class ScheduledSaving:
    """Worker that saves a run whenever a checkpoint is due."""

    def __init__(self, writer: CheckpointWriter, source: CheckpointSource) -> None:
        self.writer, self.source = writer, source

    def step(self) -> bool:
        return self.writer.save_if_due(self.source)
