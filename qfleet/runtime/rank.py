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

from qfleet.replay.deal import deal
from qfleet.roles.allreduce import AllReduce, AllReduceConfig, Table
from qfleet.roles.checkpointer import Snapshot
from qfleet.roles.evaluator import Evaluator
from qfleet.roles.metrics import Meter
from qfleet.roles.schedule import Progress, Schedule
from qfleet.runtime.inline import Inline
from qfleet.runtime.plan import Plan, Stop, Worker
from qfleet.runtime.ranks import Crew
from qfleet.types import ProcessFault

log = logging.getLogger(__name__)

PULSE_S = 1.0
"""So often do ranks hear of each other while one of them is at something long."""

OWN = ("actors", "replay", "clock", "torch_rng", "begin")
"""What a rank, or a cell of a parameter server, remembers for itself, beside its learner's randomness; all the rest is
the same everywhere, or the first one's business."""

REASONS = ("", "total_steps", "total_updates", "stop_at", "preempted", "interrupted")
AT_IT, DONE, FAILED = 0.0, 1.0, 2.0

SHARED = ("fault/bad_updates", "fault/checkpoints_failed")
"""What happens to all ranks at once is counted by the first."""


class Agreed(Stop):
    """An end that all ranks come to together: a reason that is set here is a wish until all have heard it."""

    def __init__(self, plan: Plan, progress: Callable[[], Progress], alone: bool) -> None:
        self.wish, self.alone = 0, alone
        self._agreed: str | None = None
        super().__init__(plan, progress)

    @property
    def reason(self) -> str | None:
        return self._agreed

    @reason.setter
    def reason(self, reason: str | None) -> None:
        self.wish = max(self.wish, REASONS.index(reason or ""))
        if self.alone:
            self.hear([self.wish])

    def hear(self, wishes: Iterable[float]) -> None:
        self._agreed = self._agreed or REASONS[int(max(wishes))] or None

    def __call__(self) -> bool:
        """Clocks are the same everywhere, so an end that they bring needs no vote."""
        if not super().__call__() and self.wish in (1, 2):
            self.hear([self.wish])
        return self._agreed is not None


class Council:
    """What ranks tell each other beside gradients."""

    def __init__(self, crew: Crew, inline: Inline, stop: Agreed) -> None:
        self.crew, self.stop, self.replay = crew, stop, inline.cell.replay

    def say(self) -> list[float]:
        return [float(self.replay.pace.steps), float(self.stop.wish)]

    def hear(self, told: Table) -> None:
        self.replay.elsewhere = int(sum(row[0] for row in told)) - int(told[self.crew.rank][0])
        self.stop.hear(row[1] for row in told)

    def together(self, work: Callable[[], Any] | None) -> list[int]:
        """Wait until everybody's work is done, which may be none; the ranks that failed. What fails here is raised."""
        if self.crew.size == 1:
            if work is not None:
                work()
            return []
        task = Task(work)
        while True:
            task.done.wait(PULSE_S)
            told = self.crew.gather([task.state(), *self.say()])
            self.hear([row[1:] for row in told])
            if all(row[0] != AT_IT for row in told):
                break
        if task.error is not None:
            raise task.error
        return [rank for rank, row in enumerate(told) if row[0] == FAILED]


class Task:
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
            return AT_IT
        return DONE if self.error is None else FAILED

    def _do(self, work: Callable[[], Any]) -> None:
        torch.set_num_threads(self._threads)  # a new thread begins with the default
        try:
            work()
        except BaseException as error:
            self.error = error
        finally:
            self.done.set()


class Bench(Worker, Protocol):
    """Where the first rank has evaluations made: elsewhere, for all ranks would wait for it."""

    def judge(self) -> None:
        """The newest weights, now; and wait for that."""


class Judging:
    """The first rank sees to evaluations, and for the last one all wait. In the place of each rank's `Evaluator`."""

    def __init__(self, evaluator: Evaluator, council: Council, bench: Bench | None) -> None:
        self.evaluator, self.council = evaluator, council
        self.bench = (bench or evaluator) if council.crew.rank == 0 else None
        self.state_dict, self.load_state_dict = evaluator.state_dict, evaluator.load_state_dict
        self.resume, self.policy = evaluator.resume, evaluator.policy

    @property
    def count(self) -> int:
        return self.evaluator.count

    def step(self) -> bool:
        return self.bench is not None and self.bench.step()

    def judge(self) -> None:
        if self.council.together(None if self.bench is None else self.bench.judge):
            raise ProcessFault("the first rank could not evaluate; it says why")


class Courier:
    """Hands the figures of all ranks to the first one, before it writes a record."""

    def __init__(self, crew: Crew, meter: Meter, schedule: Schedule) -> None:
        self.crew, self.meter, self.schedule = crew, meter, schedule

    def step(self) -> bool:
        if self.schedule.due(self.meter.progress()):
            self.share()
        return False

    def share(self) -> None:
        if self.crew.size == 1:
            return
        told = self.crew.exchange(b"" if self.crew.rank == 0 else json.dumps(self._own()).encode())
        for text in told[1:] if self.crew.rank == 0 else []:
            self.meter.take(json.loads(text))

    def _own(self) -> dict[str, Any]:
        figures = self.meter.hand_over()
        counters = {name: by for name, by in figures["counters"].items() if name not in SHARED}
        return figures | {"counters": counters}


class Rank:
    """Implements `session.Run`: an `Inline` whose learner, clock, end, evaluations and checkpoints are everybody's.

    Without a `bench` the first rank evaluates by itself.
    """

    def __init__(self, inline: Inline, crew: Crew, cfg: AllReduceConfig, bench: Bench | None = None) -> None:
        self.inline, self.crew = inline, crew
        self.cell, self.checkpointer = inline.cell, inline.checkpointer
        cell = self.cell
        cell.stop = stop = Agreed(inline.plan, cell.progress, crew.size == 1)
        self.council = council = Council(crew, inline, stop)
        cell.learner.meet(AllReduce(inline.plan.learner, crew, cfg.shard_optimizer, council.say, council.hear,
                                    self._ahead, cfg.overlap))
        assert isinstance(inline.evaluator, Evaluator)
        inline.evaluator = Judging(inline.evaluator, council, bench)
        self.courier = Courier(crew, cell.meter, inline.plan.log_schedule)
        inline.beside.append(self.courier)
        self.checkpointer.snapshot = self.snapshot
        cell.gauges.append(self._sent)
        self._mark = (0.0, 0)
        self._restored = False

    def run(self) -> str:
        if self.crew.size > 1 and not self._restored:
            self._begin_alike()
        return self.inline.run()

    def snapshot(self) -> Snapshot:
        self.courier.share()
        return self.inline.snapshot()

    def restore(self, state: Mapping[str, Any], segments: Iterable[tuple[str, Path]]) -> None:
        """Go on from a checkpoint of any number of ranks: with one's own part of it, or with a share of all."""
        take_part(self.inline, state, segments, self.crew.rank, self.crew.size)
        self._resume_clocks()

    def _resume_clocks(self) -> None:
        self.courier.schedule.resume(self.cell.progress())
        self._mark = (self.crew.sent_bytes, self.cell.learner.updates)
        self._restored = True

    def _ahead(self) -> int | None:
        """With priorities the importance weights of every batch have to be compared."""
        plan = self.inline.plan
        return self.cell.replay.pace.batches(plan.learner.batch_size) if plan.replay.alpha == 0 else None

    def _begin_alike(self) -> None:
        """All ranks start with the first one's weights, however these came about."""
        learner = self.cell.learner
        for flat in (learner.flat, learner.target):
            for tensor in [flat.master, *flat.net.buffers()]:
                self.crew.spread(tensor)
            flat.sync()
        self.cell.republish()

    def _sent(self) -> dict[str, float]:
        now = (self.crew.sent_bytes, self.cell.learner.updates)
        before, self._mark = self._mark, now
        if now[1] == before[1] or self.crew.size == 1:
            return {}
        return {"comm/bytes_per_update": (now[0] - before[0]) / (now[1] - before[1])}


def parts_of(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What every rank or cell remembered for itself."""
    return [dict(state), *state.get("ranks", [])]


def steps_of(state: Mapping[str, Any]) -> int:
    """The run's clock; where cells were lost it knows of steps that none of them remembers."""
    return int(state.get("steps", sum(part["clock"]["steps"] for part in parts_of(state))))


def take_part(inline: Inline, state: Mapping[str, Any], segments: Iterable[tuple[str, Path]], rank: int, size: int,
              total: int | None = None) -> None:
    """Restore one of `size` cells from a checkpoint of any number of them: its own part, or a share of all.

    `total` is the run's clock if that has gone on since.
    """
    parts, pieces, replay = parts_of(state), sort_out(segments), inline.cell.replay
    total = steps_of(state) if total is None else total
    if len(parts) == size:
        mine = {**state, **parts[rank]}
        mine["learner"] = {**state["learner"], **parts[rank].get("learner", {})}
        replay.elsewhere = total - mine["clock"]["steps"]
        inline.restore(mine, pieces.get(rank, []))
        return
    steps = total // size + (rank < total % size)
    replay.elsewhere = total - steps
    least = replay.pace.min_steps
    inline.restore({**state, "replay": None, "actors": [], "clock": {"steps": steps}}, [])
    shards = [(part["replay"], pieces.get(index, [])) for index, part in enumerate(parts) if part["replay"] is not None]
    if shards:
        replay.pace.min_steps = least  # nothing has to be filled anew
        deal(replay, shards, rank, size, steps)


PREFIX = "rank"


def part_name(rank: int, name: str) -> str:
    """How a replay segment of a rank is called in a checkpoint of all; those of the first keep their names."""
    return name if rank == 0 else f"{PREFIX}{rank:04d}-{name}"


def sort_out(segments: Iterable[tuple[str, Path]]) -> dict[int, list[tuple[str, Path]]]:
    """Segments of a checkpoint by rank, under their own names."""
    found: dict[int, list[tuple[str, Path]]] = {}
    for name, path in segments:
        rank, own = 0, name
        if name.startswith(PREFIX):
            number, _, own = name.removeprefix(PREFIX).partition("-")
            rank = int(number)
        found.setdefault(rank, []).append((own, path))
    return found
