"""Resolved settings of a run, its stop rule, and the main loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from qfleet.core.clock import Progress, Schedule
from qfleet.learner.learner import LearnerConfig
from qfleet.replay.config import ReplayConfig
from qfleet.training.checkpointer import CheckpointConfig
from qfleet.training.evaluation import EvalConfig

IDLE_SLEEP_S = 0.002
"""Sleep after a round of the main loop in which no worker was busy."""


class Worker(Protocol):
    """Part of the main loop: `step` does the work that is due and returns whether there was any."""

    def step(self) -> bool: ...


def idle(sleep_s: float) -> None:
    """Default for `serve` in `drive`: only sleep, and not at all for 0."""
    if sleep_s:
        time.sleep(sleep_s)


def drive(workers: Sequence[Worker], stop: Callable[[], bool], serve: Callable[[float], None] = idle) -> None:
    """Step all workers in turn until `stop()`; call `serve` after each round, with a sleep if no worker was busy."""
    while not stop():
        busy = [worker.step() for worker in workers]
        serve(0 if any(busy) else IDLE_SLEEP_S)


@dataclass(frozen=True)
class TrainingPlan:
    """Settings that the parts of a run are built from; every value is resolved.

    `slack_samples`: samples by which the learner may fall behind before remote actors have to wait for it.
    `decode_threads`: threads that decompress its batches.
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
    """Decides when a run ends. `reason` says why; it is None while the run continues."""

    def __init__(self, plan: TrainingPlan, progress: Callable[[], Progress]) -> None:
        self.plan, self.progress = plan, progress
        self.reason: str | None = None

    @property
    def is_external(self) -> bool:
        """True after a signal: the process has to exit soon."""
        return self.reason in ("interrupted", "preempted")

    @property
    def is_early(self) -> bool:
        """True if a signal or the user ended the run, and not its length or score: it is to be continued."""
        return self.is_external or self.reason == "stopped"

    def request(self, reason: str) -> None:
        """Ask the run to end for this reason."""
        self.reason = reason

    def end_early(self) -> None:
        """Ask the run to end as by `stop`; no effect on a run that is ending already."""
        if self.reason is None:
            self.request("stopped")

    def check_score(self, mean: float) -> None:
        """End the run if the mean return of an evaluation reaches `stop_at`."""
        if self.plan.stop_at is not None and mean >= self.plan.stop_at:
            self.request("stop_at")

    def reached_limit(self) -> str | None:
        """Reason to end by the number of steps or updates."""
        now = self.progress()
        if now.steps >= self.plan.total_steps:
            return "total_steps"
        if self.plan.total_updates is not None and now.updates >= self.plan.total_updates:
            return "total_updates"
        return None

    def __call__(self) -> bool:
        if self.reason is None:
            self.reason = self.reached_limit()
        return self.reason is not None


class PauseOnInterrupt:
    """Receives the signals of a run that its caller continues: SIGINT only sets `interrupted`, others end the run.

    An evaluation that has begun is completed, as it would be repeated later with other weights.
    """

    def __init__(self, stop: StopRule) -> None:
        self._stop, self.interrupted = stop, False

    @property
    def reason(self) -> str | None:
        return "interrupted" if self.interrupted else self._stop.reason

    @reason.setter
    def reason(self, reason: str | None) -> None:
        if reason == "interrupted":
            self.interrupted = True
        elif reason is not None:
            self._stop.request(reason)
