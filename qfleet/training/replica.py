"""One rank of a crew: a cell with its actors in one process, in step with the same in other processes.

    every round    actors step ──▶ vote ──▶ as many updates as everybody has batches for
    now and then   the first rank collects figures, all save; meanwhile they go on hearing of each other

A vote tells how many steps each rank has taken and whether it wants to stop. After the last vote of a round all ranks
know the same, so whatever is decided from that, the end, a checkpoint, an evaluation, all decide alike.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from qfleet.core.clock import RunClock
from qfleet.core.errors import ProcessFault
from qfleet.core.schedule import Progress, Schedule
from qfleet.replay.redistribute import redistribute
from qfleet.sync.allreduce import AllReduce, AllReduceConfig, RankRows
from qfleet.sync.process_group import ProcessGroup
from qfleet.training.checkpointer import Snapshot
from qfleet.training.evaluation import Evaluator
from qfleet.training.loop import StopRule, TrainingPlan, Worker
from qfleet.training.meter import Meter
from qfleet.training.single_process import SingleProcessRun

log = logging.getLogger(__name__)

SYNC_PERIOD_S = 1.0
"""So often do ranks hear of each other while one of them is at something long."""

PER_RANK_KEYS = ("actors", "replay", "clock", "torch_rng", "begin")
"""What a rank, or a cell of a parameter server, remembers for itself, beside its learner's randomness; all the rest is
the same everywhere, or the first one's business."""

REASONS = ("", "total_steps", "total_updates", "stop_at", "preempted", "interrupted")
RUNNING, DONE, FAILED = 0.0, 1.0, 2.0

SHARED = ("fault/bad_updates", "fault/checkpoints_failed")
"""What happens to all ranks at once is counted by the first."""


class ConsensusStop(StopRule):
    """An end that all ranks come to together: a reason that is set here is a wish until all have heard it."""

    def __init__(self, plan: TrainingPlan, progress: Callable[[], Progress], alone: bool) -> None:
        self.proposal, self.alone = 0, alone
        self._agreed: str | None = None
        super().__init__(plan, progress)

    @property
    def reason(self) -> str | None:
        return self._agreed

    @reason.setter
    def reason(self, reason: str | None) -> None:
        self.proposal = max(self.proposal, REASONS.index(reason or ""))
        if self.alone:
            self.receive_votes([self.proposal])

    def receive_votes(self, wishes: Iterable[float]) -> None:
        self._agreed = self._agreed or REASONS[int(max(wishes))] or None

    def __call__(self) -> bool:
        """Clocks are the same everywhere, so an end that they bring needs no vote."""
        if not super().__call__() and self.proposal in (1, 2):
            self.receive_votes([self.proposal])
        return self._agreed is not None


class RankSync:
    """What ranks tell each other beside gradients."""

    def __init__(self, group: ProcessGroup, clock: RunClock, stop: ConsensusStop) -> None:
        self.group, self.stop, self.clock = group, stop, clock

    def local_state(self) -> list[float]:
        return [float(self.clock.local_steps), float(self.stop.proposal)]

    def receive_states(self, told: RankRows) -> None:
        self.clock.remote_steps = int(sum(row[0] for row in told)) - int(told[self.group.rank][0])
        self.stop.receive_votes(row[1] for row in told)

    def run_together(self, work: Callable[[], Any] | None) -> list[int]:
        """Wait until everybody's work is done, which may be none; the ranks that failed. What fails here is raised."""
        if self.group.size == 1:
            if work is not None:
                work()
            return []
        task = BackgroundTask(work)
        while True:
            task.done.wait(SYNC_PERIOD_S)
            told = self.group.all_gather([task.state(), *self.local_state()])
            self.receive_states([row[1:] for row in told])
            if all(row[0] != RUNNING for row in told):
                break
        if task.error is not None:
            raise task.error
        return [rank for rank, row in enumerate(told) if row[0] == FAILED]


class BackgroundTask:
    """Something done in a thread, so that this one can go on talking."""

    def __init__(self, work: Callable[[], Any] | None) -> None:
        self.done, self.error = threading.Event(), None
        self._threads = torch.get_num_threads()
        if work is None:
            self.done.set()
        else:
            threading.Thread(target=self._do, args=(work,), name="task", daemon=True).start()

    error: BaseException | None

    def state(self) -> float:
        if not self.done.is_set():
            return RUNNING
        return DONE if self.error is None else FAILED

    def _do(self, work: Callable[[], Any]) -> None:
        torch.set_num_threads(self._threads)  # a new thread begins with the default
        try:
            work()
        except BaseException as error:
            self.error = error
        finally:
            self.done.set()


class EvaluatorBackend(Worker, Protocol):
    """Where the first rank has evaluations made: elsewhere, for all ranks would wait for it."""

    def evaluate(self) -> None:
        """The newest weights, now; and wait for that."""


class RankZeroEvaluator:
    """The first rank sees to evaluations, and for the last one all wait. In the place of each rank's `Evaluator`."""

    def __init__(self, evaluator: Evaluator, rank_sync: RankSync, bench: EvaluatorBackend | None) -> None:
        self.evaluator, self.rank_sync = evaluator, rank_sync
        self.backend = (bench or evaluator) if rank_sync.group.rank == 0 else None
        self.state_dict, self.load_state_dict = evaluator.state_dict, evaluator.load_state_dict
        self.resume, self.policy = evaluator.resume, evaluator.policy

    @property
    def count(self) -> int:
        return self.evaluator.count

    def step(self) -> bool:
        return self.backend is not None and self.backend.step()

    def evaluate(self) -> None:
        if self.rank_sync.run_together(None if self.backend is None else self.backend.evaluate):
            raise ProcessFault("the first rank could not evaluate; it says why")


class MetricsGather:
    """Hands the figures of all ranks to the first one, before it writes a record."""

    def __init__(self, crew: ProcessGroup, meter: Meter, schedule: Schedule) -> None:
        self.group, self.meter, self.schedule = crew, meter, schedule

    def step(self) -> bool:
        if self.schedule.due(self.meter.progress()):
            self.gather()
        return False

    def gather(self) -> None:
        if self.group.size == 1:
            return
        told = self.group.exchange(b"" if self.group.rank == 0 else json.dumps(self._own()).encode())
        for text in told[1:] if self.group.rank == 0 else []:
            self.meter.merge(json.loads(text))

    def _own(self) -> dict[str, Any]:
        figures = self.meter.drain()
        counters = {name: by for name, by in figures["counters"].items() if name not in SHARED}
        return figures | {"counters": counters}


class ReplicaRun:
    """Implements `session.Run`: an `Inline` whose learner, clock, end, evaluations and checkpoints are everybody's.

    Without a `bench` the first rank evaluates by itself.
    """

    def __init__(
        self, inline: SingleProcessRun, crew: ProcessGroup, cfg: AllReduceConfig, bench: EvaluatorBackend | None = None
    ) -> None:
        self.local_run, self.group = inline, crew
        self.core, self.checkpointer = inline.core, inline.checkpointer
        cell = self.core
        cell.stop = stop = ConsensusStop(inline.plan, cell.progress, crew.size == 1)
        self.rank_sync = rank_sync = RankSync(crew, cell.clock, stop)
        cell.learner.set_sync(
            AllReduce(
                inline.plan.learner, crew, cfg.shard_optimizer, rank_sync.local_state,
                rank_sync.receive_states, self._ahead, cfg.overlap)
        )
        assert isinstance(inline.evaluator, Evaluator)
        inline.evaluator = RankZeroEvaluator(inline.evaluator, rank_sync, bench)
        self.metrics_gather = MetricsGather(crew, cell.meter, inline.plan.log_schedule)
        inline.extra_workers.append(self.metrics_gather)
        self.checkpointer.snapshot = self.snapshot
        cell.gauges.append(self._sent)
        self._mark = (0.0, 0)
        self._restored = False

    def run(self) -> str:
        if self.group.size > 1 and not self._restored:
            self._broadcast_weights()
        return self.local_run.run()

    def snapshot(self) -> Snapshot:
        self.metrics_gather.gather()
        return self.local_run.snapshot()

    def restore(self, state: Mapping[str, Any], segments: Iterable[tuple[str, Path]]) -> None:
        """Go on from a checkpoint of any number of ranks: with one's own part of it, or with a share of all."""
        restore_rank(self.local_run, state, segments, self.group.rank, self.group.size)
        self._resume_clocks()

    def _resume_clocks(self) -> None:
        self.metrics_gather.schedule.resume(self.core.progress())
        self._mark = (self.group.sent_bytes, self.core.learner.updates)
        self._restored = True

    def _ahead(self) -> int | None:
        """With priorities the importance weights of every batch have to be compared."""
        plan = self.local_run.plan
        return (
            self.core.replay.rate_limiter.batches_allowed(plan.learner.batch_size) if plan.replay.alpha == 0 else None
        )

    def _broadcast_weights(self) -> None:
        """All ranks start with the first one's weights, however these came about."""
        learner = self.core.learner
        for flat in (learner.flat, learner.target):
            for tensor in [flat.master, *flat.net.buffers()]:
                self.group.broadcast(tensor)
            flat.copy_to_network()
        self.core.republish()

    def _sent(self) -> dict[str, float]:
        now = (self.group.sent_bytes, self.core.learner.updates)
        before, self._mark = self._mark, now
        if now[1] == before[1] or self.group.size == 1:
            return {}
        return {"comm/bytes_per_update": (now[0] - before[0]) / (now[1] - before[1])}


def per_rank_states(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What every rank or cell remembered for itself."""
    return [dict(state), *state.get("ranks", [])]


def saved_steps(state: Mapping[str, Any]) -> int:
    """The run's clock; where cells were lost it knows of steps that none of them remembers."""
    return int(state.get("steps", sum(part["clock"]["steps"] for part in per_rank_states(state))))


def restore_rank(
    inline: SingleProcessRun, state: Mapping[str, Any], segments: Iterable[tuple[str, Path]], rank: int,
    size: int, total: int | None = None) -> None:
    """Restore one of `size` cells from a checkpoint of any number of them: its own part, or a share of all.

    `total` is the run's clock if that has gone on since.
    """
    parts, pieces, replay = per_rank_states(state), segments_by_rank(segments), inline.core.replay
    clock = inline.core.clock
    total = saved_steps(state) if total is None else total
    if len(parts) == size:
        mine = {**state, **parts[rank]}
        mine["learner"] = {**state["learner"], **parts[rank].get("learner", {})}
        clock.remote_steps = total - mine["clock"]["steps"]
        inline.restore(mine, pieces.get(rank, []))
        return
    steps = total // size + (rank < total % size)
    clock.remote_steps = total - steps
    least = replay.rate_limiter.min_steps
    inline.restore({**state, "replay": None, "actors": [], "clock": {"steps": steps}}, [])
    shards = [(part["replay"], pieces.get(index, [])) for index, part in enumerate(parts) if part["replay"] is not None]
    if shards:
        replay.rate_limiter.min_steps = least  # nothing has to be filled anew
        redistribute(replay, shards, rank, size, steps)


PREFIX = "rank"


def rank_segment_name(rank: int, name: str) -> str:
    """How a replay segment of a rank is called in a checkpoint of all; those of the first keep their names."""
    return name if rank == 0 else f"{PREFIX}{rank:04d}-{name}"


def segments_by_rank(segments: Iterable[tuple[str, Path]]) -> dict[int, list[tuple[str, Path]]]:
    """Segments of a checkpoint by rank, under their own names."""
    found: dict[int, list[tuple[str, Path]]] = {}
    for name, path in segments:
        rank, own = 0, name
        if name.startswith(PREFIX):
            number, _, own = name.removeprefix(PREFIX).partition("-")
            rank = int(number)
        found.setdefault(rank, []).append((own, path))
    return found
