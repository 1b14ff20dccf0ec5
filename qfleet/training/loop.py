"""A run as data, and the one loop that drives it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from qfleet.core.schedule import Progress, Schedule
from qfleet.learner.learner import LearnerConfig
from qfleet.replay.config import ReplayConfig
from qfleet.training.checkpointer import CheckpointConfig
from qfleet.training.evaluation import EvalConfig

NAP_S = 0.002


class Worker(Protocol):
    """A role that acts on its own: `step` does what is due and says whether there was anything."""

    def step(self) -> bool: ...


def idle(nap_s: float) -> None:
    """Serve nobody: sleep, if there is time to."""
    if nap_s:
        time.sleep(nap_s)


def drive(workers: Sequence[Worker], stop: Callable[[], bool], serve: Callable[[float], None] = idle) -> None:
    """Step all workers in turn until `stop`; between rounds serve others, napping when nobody was busy."""
    while not stop():
        busy = [worker.step() for worker in workers]
        serve(0 if any(busy) else NAP_S)


@dataclass(frozen=True)
class TrainingPlan:
    """What the roles of a run are built from; every value is resolved.

    `slack_samples`: so many samples may the learner be behind before actors elsewhere have to wait for it.
    `decode_threads` decompress its batches.
    """

    seed: int
    device: torch.device
    total_steps: int
    total_updates: int | None
    stop_at: float | None
    exact_resume: bool
    log_period_steps: int
    log_period_updates: int | None
    replay: ReplayConfig
    learner: LearnerConfig
    eval: EvalConfig
    checkpoint: CheckpointConfig
    slack_samples: float
    decode_threads: int = 1

    @property
    def log_schedule(self) -> Schedule:
        return Schedule(self.log_period_steps, self.log_period_updates)


class StopRule:
    """Knows when a run ends and why: `reason` is None while it goes on."""

    def __init__(self, plan: TrainingPlan, progress: Callable[[], Progress]) -> None:
        self.plan, self.progress = plan, progress
        self.reason: str | None = None

    @property
    def is_external(self) -> bool:
        """Whether somebody outside asked for the end, who will not wait long."""
        return self.reason in ("interrupted", "preempted")

    def check_score(self, mean: float) -> None:
        """Judge a greedy evaluation against `stop_at`."""
        if self.plan.stop_at is not None and mean >= self.plan.stop_at:
            self.reason = "stop_at"

    def __call__(self) -> bool:
        now = self.progress()
        if self.reason is None and now.steps >= self.plan.total_steps:
            self.reason = "total_steps"
        if self.reason is None and self.plan.total_updates is not None and now.updates >= self.plan.total_updates:
            self.reason = "total_updates"
        return self.reason is not None
