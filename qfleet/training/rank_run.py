"""One rank of an allreduce run: a `LearnerRun` in lockstep with the other ranks.

    every round      actors step ──▶ vote ──▶ as many updates as all ranks have batches for
    periodically     rank 0 gathers metrics, all ranks save; they keep exchanging their state meanwhile

A vote carries the steps that each rank has taken and its stop proposal. After the last vote of a round all ranks have
the same information, so they make the same decisions: stop, checkpoint, evaluation.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from qfleet.core.clock import Progress, RunClock, Schedule
from qfleet.core.errors import ProcessFault
from qfleet.replay.store import ReplayStore
from qfleet.sync.allreduce import AllReduce, AllReduceConfig, RankLink, RankRows
from qfleet.sync.gradient_sync import GradientSync, OptimizerConfig
from qfleet.sync.process_group import ProcessGroup
from qfleet.training.callbacks import RunControl
from qfleet.training.checkpointer import CheckpointWriter, Snapshot
from qfleet.training.evaluation import EvaluatorSlot
from qfleet.training.learner_core import Components, Hooks, LearnerCore
from qfleet.training.learner_part import restore_learner
from qfleet.training.learner_run import LearnerRun, RunSetup
from qfleet.training.loop import StopRule, TrainingPlan
from qfleet.training.meter import Meter
from qfleet.training.remote_actors import merge_actor_metrics

log = logging.getLogger(__name__)

SYNC_PERIOD_S = 1.0
"""Period of state exchange between ranks during a long task (checkpoint, evaluation) of one of them."""

REASONS = ("", "total_steps", "total_updates", "stop_at", "stopped", "preempted", "interrupted")
RUNNING, DONE, FAILED = 0.0, 1.0, 2.0

COUNTED_ON_RANK_ZERO = ("fault/bad_updates", "fault/checkpoints_failed")
"""Counters of events that happen on all ranks at once: only rank 0 reports them."""


class ConsensusStop(StopRule):
    """Stop rule agreed by all ranks: a reason that is set locally is a proposal until the next vote."""

    def __init__(self, plan: TrainingPlan, progress: Callable[[], Progress], single: bool) -> None:
        self.proposal, self.single = 0, single
        self._agreed: str | None = None
        super().__init__(plan, progress)

    @property
    def reason(self) -> str | None:
        return self._agreed

    @reason.setter
    def reason(self, reason: str | None) -> None:
        self.proposal = max(self.proposal, REASONS.index(reason or ""))
        if self.single:
            self.receive_votes([self.proposal])

    def receive_votes(self, proposals: Iterable[float]) -> None:
        """Adopt the highest of all proposals (indices into `REASONS`); the first reason agreed on is final."""
        self._agreed = self._agreed or REASONS[int(max(proposals))] or None

    def __call__(self) -> bool:
        """Step and update counts are equal on all ranks, so a stop that follows from them needs no vote.

        It comes before proposals of this rank, which the others do not know yet.
        """
        if self._agreed is None and (reason := self.reached_limit()) is not None:
            self.receive_votes([REASONS.index(reason)])
        return self._agreed is not None


class RankConsensus:
    """State that ranks agree on in addition to gradients: steps of the run, its end, and requested checkpoints.

    Owns clock and stop rule. Votes are exchanged with the gradients, or alone while a rank does other work.
    """

    def __init__(self, group: ProcessGroup, plan: TrainingPlan) -> None:
        self.group, self.clock = group, RunClock()
        self.stop = ConsensusStop(plan, self.clock.progress, group.size == 1)
        self.save_requests = 0  # agreed by all ranks
        self._proposed_requests = 0

    def request_save(self) -> None:
        """Propose a checkpoint; all ranks learn of it at the next vote."""
        self._proposed_requests += 1
        if self.group.size == 1:
            self.save_requests = self._proposed_requests

    VALUES = 3
    """Length of `local_state`."""

    def local_state(self) -> list[float]:
        return [float(self.clock.local_steps), float(self.stop.proposal), float(self._proposed_requests)]

    def receive_states(self, rows: RankRows) -> None:
        self.clock.set_remote_steps(int(sum(row[0] for row in rows)) - int(rows[self.group.rank][0]))
        self.stop.receive_votes(row[1] for row in rows)
        self.save_requests = int(max(row[2] for row in rows))

    def run_together(self, work: Callable[[], Any] | None) -> list[int]:
        """Do `work` (None: nothing) and wait for all ranks; returns the failed ranks. A local failure is raised."""
        if self.group.size == 1:
            if work is not None:
                work()
            return []
        task = BackgroundTask(work)
        while True:
            task.done.wait(SYNC_PERIOD_S)
            rows = self.group.all_gather([task.state(), *self.local_state()])
            self.receive_states([row[1:] for row in rows])
            if all(row[0] != RUNNING for row in rows):
                break
        if task.error is not None:
            raise task.error
        return [rank for rank, row in enumerate(rows) if row[0] == FAILED]


class BackgroundTask:
    """Runs `work` in a thread, so that the calling thread can keep exchanging state with other ranks."""

    def __init__(self, work: Callable[[], Any] | None) -> None:
        self.done, self.error = threading.Event(), None
        self._threads = torch.get_num_threads()
        if work is None:
            self.done.set()
        else:
            threading.Thread(target=self._run, args=(work,), name="task", daemon=True).start()

    error: BaseException | None

    def state(self) -> float:
        if not self.done.is_set():
            return RUNNING
        return DONE if self.error is None else FAILED

    def _run(self, work: Callable[[], Any]) -> None:
        torch.set_num_threads(self._threads)  # a new thread starts with the default
        try:
            work()
        except BaseException as error:
            self.error = error
        finally:
            self.done.set()


class RankZeroEvaluator:
    """Evaluator of all ranks: only rank 0 evaluates, with `evaluator`; all ranks wait for the last evaluation.

    `evaluator` keeps the state for checkpoints, also if `backend` evaluates in its place.
    """

    def __init__(self, evaluator: EvaluatorSlot, consensus: RankConsensus,
                 backend: EvaluatorSlot | None = None) -> None:
        self.evaluator, self.consensus = evaluator, consensus
        self.backend = (backend or evaluator) if consensus.group.rank == 0 else None
        self.state_dict, self.load_state_dict, self.resume = (
            evaluator.state_dict, evaluator.load_state_dict, evaluator.resume)

    def step(self) -> bool:
        return self.backend is not None and self.backend.step()

    def request(self) -> None:
        if self.backend is not None:
            self.backend.request()

    def evaluate(self) -> None:
        if self.consensus.run_together(None if self.backend is None else self.backend.evaluate):
            raise ProcessFault("the evaluation on rank 0 failed; see the log of rank 0")


class RequestedSaves:
    """Worker that passes on the checkpoint requests that all ranks have agreed on to the writer of its rank."""

    def __init__(self, consensus: RankConsensus, checkpoints: CheckpointWriter) -> None:
        self.consensus, self.checkpoints = consensus, checkpoints
        self._passed_on = 0

    def step(self) -> bool:
        if self.consensus.save_requests > self._passed_on:
            self._passed_on = self.consensus.save_requests
            self.checkpoints.request()
        return False


class MetricsGather:
    """Merges the metrics of all ranks into the meter of rank 0 before it emits a record.

    `actor_metrics` is the gauge of this rank's actors; `metrics` is that of all ranks' actors.
    """

    def __init__(self, group: ProcessGroup, meter: Meter, schedule: Schedule,
                 actor_metrics: Callable[[], Mapping[str, float]]) -> None:
        self.group, self.meter, self.schedule, self.actor_metrics = group, meter, schedule, actor_metrics
        self._others: list[Mapping[str, float]] = []  # actor metrics of the other ranks at the last exchange

    def step(self) -> bool:
        if self.schedule.due(self.meter.progress()):
            self.gather()
        return False

    def gather(self) -> None:
        """Collective: called by all ranks at the same point."""
        if self.group.size == 1:
            return
        texts = self.group.exchange(b"" if self.group.rank == 0 else json.dumps(self._local_metrics()).encode())
        if self.group.rank == 0:
            others = [json.loads(text) for text in texts[1:]]
            self._others = [drained["actors"] for drained in others]
            for drained in others:
                self.meter.merge(drained)

    def metrics(self) -> dict[str, float]:
        """Gauge: the actors of all ranks, if they are other processes."""
        return merge_actor_metrics([self.actor_metrics(), *self._others])

    def _local_metrics(self) -> dict[str, Any]:
        actors = dict(self.actor_metrics())  # first, since it counts restarts
        metrics = self.meter.drain() | {"actors": actors}
        counters = {name: by for name, by in metrics["counters"].items() if name not in COUNTED_ON_RANK_ZERO}
        return metrics | {"counters": counters}


BuildGradientSync = Callable[[OptimizerConfig, RankLink], GradientSync]


def build_allreduce(cfg: AllReduceConfig) -> BuildGradientSync:
    return lambda optimizer, link: AllReduce(optimizer, link, cfg.shard_optimizer, cfg.overlap)


class RankRun(LearnerRun):
    """A `LearnerRun` whose updates, step clock, stop, evaluations and checkpoints are common to all ranks.

    `build` creates the gradient synchronisation. `make_backend` returns the evaluator of rank 0 if it is not the one
    of the setup: usually another process, since all ranks would wait for an evaluation in this one.
    """

    def __init__(self, setup: RunSetup, plan: TrainingPlan, hooks: Hooks, consensus: RankConsensus,
                 build: BuildGradientSync,
                 make_backend: Callable[[LearnerCore], EvaluatorSlot | None] = lambda core: None) -> None:
        self.group, self.consensus = consensus.group, consensus

        def make_sync(replay: ReplayStore[Any], meter: Meter) -> GradientSync:
            return build(plan.learner, RankLink(self.group, self._vote_values, self._receive_votes,
                                                lambda: setup.batches_ahead(plan, replay)))

        super().__init__(
            setup, plan, hooks, Components(consensus.clock, consensus.stop, make_sync),
            lambda evaluator, core: RankZeroEvaluator(evaluator, consensus, make_backend(core)))
        self.metrics_gather = MetricsGather(self.group, self.core.meter, plan.log_schedule, self.acting.metrics)
        self.core.meter.add_gauge(self.metrics_gather.metrics)
        self.workers = [self.metrics_gather, RequestedSaves(consensus, self.checkpoints)]
        self.core.meter.add_gauge(self._comm_metrics)
        self._last_sent = (0.0, 0)  # bytes sent and updates at the last record
        self._restored = False

    def control(self) -> RunControl:
        return RunControl(self.core, self.evaluator.request, self.consensus.request_save)

    def run(self) -> str:
        """Train to the end with equal initial weights on all ranks; returns the stop reason."""
        if self.group.size > 1 and not self._restored:
            self._broadcast_weights()
        return super().run()

    def snapshot(self) -> Snapshot:
        self.metrics_gather.gather()
        return super().snapshot()

    def restore(self, state: Mapping[str, Any], segments: Iterable[tuple[str, Path]]) -> None:
        """Resume from a checkpoint of any number of ranks: from this rank's part, or from a share of all parts."""
        restore_learner(self.core, super().restore, state, segments, self.group.rank, self.group.size)
        self._resume_clocks()

    def _resume_clocks(self) -> None:
        self.metrics_gather.schedule.resume(self.core.progress())
        self._last_sent = (self.group.sent_bytes, self.core.learner.updates)
        self._restored = True

    def _vote_values(self) -> list[float]:
        """Values that this rank adds to a vote: its state, and the moments of its new rows for running statistics."""
        moments = self.core.learner.row_moments
        return [*self.consensus.local_state(), *([] if moments is None else moments.take_row())]

    def _receive_votes(self, rows: RankRows) -> None:
        """Take over the states of all ranks, and the moments of their new rows."""
        self.consensus.receive_states(rows)
        if (moments := self.core.learner.row_moments) is not None:
            moments.merge_ranks([row[RankConsensus.VALUES:] for row in rows])

    def _broadcast_weights(self) -> None:
        """Copy the weights and buffers of rank 0 to all ranks, whatever initialised them."""
        learner = self.core.learner
        for flat in (learner.flat, learner.target):
            for tensor in [flat.master, *flat.net.buffers()]:
                self.group.broadcast(tensor)
            flat.copy_to_network()
        if learner.row_moments is not None:
            learner.row_moments.read_network()
        self.core.republish()

    def _comm_metrics(self) -> dict[str, float]:
        """Gauge: bytes sent per update since the last record."""
        now = (self.group.sent_bytes, self.core.learner.updates)
        before, self._last_sent = self._last_sent, now
        if now[1] == before[1] or self.group.size == 1:
            return {}
        return {"comm/bytes_per_update": (now[0] - before[0]) / (now[1] - before[1])}
