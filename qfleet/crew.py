"""Runs whose learners are several and average their gradients: what each rank does, and who starts torchrun's.

    torchrun ... -m qfleet train RECIPE gradients=allreduce       the user starts the ranks; the first makes the run
    srun ... qfleet train RECIPE gradients=allreduce              the same
    qfleet train RECIPE gradients=allreduce cells=N               we make the run and start torchrun, which starts them

The first rank keeps directory, records and checkpoints; the others add their parts. All see the same folder.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from qfleet import head, recipe, session
from qfleet.archive import Archive
from qfleet.assemble import cast_of, make_env, plan_of, settle
from qfleet.cellhost import Orders, as_text
from qfleet.gallery import Gallery, Opening, beside
from qfleet.roles.learner import Diverged
from qfleet.roles.metrics import Sink
from qfleet.roles.seeds import seed_for
from qfleet.runs.checkpoint import Checkpoint, Checkpoints, open_checkpoint
from qfleet.runs.directory import RunDirectory, default_name, replace_text, run_names
from qfleet.runtime.cell import Outside
from qfleet.runtime.inline import Inline
from qfleet.runtime.life import surroundings
from qfleet.runtime.memory import keep_pages
from qfleet.runtime.orphans import when_orphaned
from qfleet.runtime.plan import Plan
from qfleet.runtime.rank import Rank
from qfleet.runtime.ranks import Crew, Place, crew
from qfleet.runtime.signals import obeyed
from qfleet.runtime.supervise import Child, Failure
from qfleet.runtime.tether import Tie
from qfleet.runtime.threads import usable_cores
from qfleet.session import Attempt, TrainResult, concluded, memory_advised, require_same, source_of_weights
from qfleet.settings import RunConfig
from qfleet.types import BadOutput, EnvSpec, ProcessFault, RunLost, UserError, VectorEnv

log = logging.getLogger(__name__)


def start(config: RunConfig, sinks: Sequence[Sink], provenance: Mapping[str, str]) -> TrainResult:
    """Train a new run: as a rank, if torchrun started this process; else by starting torchrun, if there are several."""
    place = Place.here()
    if place is None and config.cells > 1:
        return head.start(config, sinks, provenance, Launch)
    size = place.size if place else 1
    if place and config.cells not in (1, size):
        raise UserError(f"cells={config.cells}, but {size} ranks were started: leave cells out, or call qfleet "
                        "without torchrun or srun, and it starts them itself")
    with met(config, place) as peers, playing(config, size) as env:
        config = settle(config.model_copy(update={"cells": size}), env.spec)
        source = source_of_weights(config, env.spec)
        with ExitStack() as stack:
            directory = _made(config, peers, stack)
            part = Part(config, env, directory, peers, None if peers.rank else _newest(config, directory), Post(place))
            origin = {"sources": dict(provenance), **_job()}
            return part.work(sinks, origin, source)


def go_on(directory: RunDirectory, config: RunConfig, sinks: Sequence[Sink]) -> TrainResult:
    """Continue a run from its newest valid checkpoint, with as many ranks as there are now."""
    place = Place.here()
    if place is None and config.cells > 1:
        return head.go_on(directory, config, sinks, Launch)
    size = place.size if place else 1
    with met(config, place) as peers, ExitStack() as stack:
        checkpoint, before = (None, None) if peers.rank else session.reopened(directory, config, stack)
        if any(peers.exchange(b"" if before is None else b"ended")):
            return before or _bystander(directory, "total_steps")
        with playing(config, size) as env:
            config = settle(config.model_copy(update={"cells": size}), env.spec)
            source = source_of_weights(config, env.spec) if checkpoint is None and peers.rank == 0 else None
            return Part(config, env, directory, peers, checkpoint, Post(place)).work(sinks, _job(), source)


def run_rank(private: Path) -> int:
    """Be a rank of a run that was prepared by `Launch`: begin it, or go on with it if this is not the first attempt.

    torchrun starts anew whoever fails. What no other attempt would mend is left for the head to read, and none is made.
    """
    place = Place.here()
    if place is None:
        raise UserError("a rank is started by torchrun")
    if not (private / Launch.HOPELESS).exists():
        try:
            if place.rank == 0:
                replace_text(private / Launch.PID, str(os.getpid()))
            result = be_rank(Orders.read(private), Post(place))
            if place.rank == 0:
                replace_text(private / Orders.RESULT, as_text(result))
        except (UserError, RunLost, Diverged, BadOutput) as error:
            log.error("%s", error)
            what = {UserError: "", BadOutput: "environment failed: "}.get(type(error), "training failed: ")
            told = {"text": f"{what}{error}", "ours": not isinstance(error, UserError)}
            replace_text(private / Launch.HOPELESS, json.dumps(told))
    return 0


@dataclass(frozen=True)
class Post:
    """Where a rank stands: which of them it is, who may ask it to leave, and how its evaluator comes to the first.

    Without a tie it leaves when whoever started it is gone; without an opening the first rank starts the evaluator.
    """

    place: Place | None
    tie: Tie | None = None
    opening: Opening | None = None


def be_rank(orders: Orders, post: Post) -> TrainResult:
    """Be a rank of a run that a head has prepared, from its newest checkpoint on if there is one."""
    directory = RunDirectory(Path(orders.directory))
    config = recipe.resolve(str(directory.config), []).config
    with met(config, post.place) as peers, playing(config, peers.size) as env:
        source = source_of_weights(config, env.spec)
        part = Part(config, env, directory, peers, None if peers.rank else _newest(config, directory), post)
        return part.work((), orders.origin, source)


class Launch(head.Head):
    """A head whose cell is torchrun, with a rank for each cell. Restarts are torchrun's."""

    PID = "rank.pid"
    HOPELESS = "hopeless.json"

    def __init__(self, config: RunConfig, spec: EnvSpec, directory: RunDirectory, sinks: Sequence[Sink],
                 origin: Mapping[str, Any]) -> None:
        super().__init__(config, spec, directory, sinks, origin)
        # torchrun has no heartbeat; it watches the ranks, and they watch each other.
        self.supervisor.patience = replace(self.supervisor.patience, first_beat_s=math.inf)

    def _children(self) -> list[Child]:
        rule = self.config.allreduce
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                 str(self.config.cells), "--max-restarts", str(rule.max_restarts), "--monitor-interval", "0.2",
                 "-m", "qfleet", "_member", "rank", str(self.private)]
        # torchrun would set 1. What torch itself takes, each rank sets; this is the most that a rank may take.
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(plan_of(self.config).decode_threads))}
        return [Child(head.CELL, words, surroundings() | threads,
                      self.directory.path / "logs" / "ranks.log", 0)]

    def _result(self, failure: Failure | None) -> TrainResult:
        try:
            told = json.loads((self.private / self.HOPELESS).read_text())
        except FileNotFoundError:
            return super()._result(failure)
        raise ProcessFault(told["text"]) if told["ours"] else UserError(told["text"])

    def _pid(self) -> int | None:
        """Whom to tell: one rank tells the others. Before it lives, torchrun, which then gives up."""
        try:
            return int((self.private / self.PID).read_text())
        except (FileNotFoundError, ValueError):
            return super()._pid()


@contextmanager
def met(config: RunConfig, place: Place | None) -> Iterator[Crew]:
    with crew(place, _device(config, place), config.allreduce.timeout_s) as peers:
        yield peers


@contextmanager
def playing(config: RunConfig, ranks: int) -> Iterator[VectorEnv]:
    """The first environment of this rank; ranks share the cores."""
    with closing(make_env(_shared_cores(config, ranks).env, config.env.lanes,
                          stall_timeout_s=config.run.stall_timeout_s)) as env:
        yield env


def _shared_cores(config: RunConfig, ranks: int) -> RunConfig:
    cores = int(config.ray.cell_cpus) if config.placement == "ray" else usable_cores() // ranks
    threads = config.env.threads or max(1, cores)
    return config.model_copy(update={"env": config.env.model_copy(update={"threads": threads})})


def _device(config: RunConfig, place: Place | None) -> torch.device:
    """Every rank of a host has a GPU of its own, if they train on GPUs."""
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and place is not None:
        return torch.device("cuda", place.local % max(1, torch.cuda.device_count()))
    return torch.device(name)


def _made(config: RunConfig, peers: Crew, stack: ExitStack) -> RunDirectory:
    """The run's directory: the first rank makes it, or finds the one that an earlier attempt of this job made."""
    path = b""
    if peers.rank == 0:
        place = Place.here()
        directory = _earlier(config) if place is not None and place.attempt else None
        if directory is not None:
            directory.lock()
        else:
            directory = RunDirectory.create(config.run, default_name(config.env.id, config.agent.algo, config.seed))
        stack.callback(directory.unlock)
        path = str(directory.path).encode()
    return RunDirectory(Path(peers.exchange(path)[0].decode()))


def _job() -> dict[str, str]:
    """What tells this job from all others: the agent that started this process, or the step of Slurm's that it is."""
    if Place.here() is None:
        return {}
    agent = f"{os.uname().nodename}/{os.getppid()}"
    if "SLURM_STEP_ID" in os.environ:  # whose agents are several, and the first rank may be anybody's
        agent = f"slurm/{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"
    return {"torchrun": f"{agent}/{os.environ.get('TORCHELASTIC_RUN_ID', '')}"}


def _earlier(config: RunConfig) -> RunDirectory | None:
    for name in run_names(config.run.root):
        directory = RunDirectory(Path(config.run.root).expanduser() / name)
        try:
            attempts = json.loads(directory.record.read_text())["attempts"]
            if attempts and attempts[-1].get("torchrun") == _job()["torchrun"]:
                return directory
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    return None


def _newest(config: RunConfig, directory: RunDirectory) -> Checkpoint | None:
    return Checkpoints(directory.checkpoints, config.checkpoint.keep).newest()


def _bystander(directory: RunDirectory, reason: str) -> TrainResult:
    """How a run ended, as a rank tells it that keeps no books."""
    return TrainResult(directory.path, 0, 0, 0, 0.0, None, reason, session.EXIT_CODES.get(reason, 0))


class Part:
    """One rank's part of a run. Only the first is given the checkpoint; it tells the others which one it is."""

    def __init__(self, config: RunConfig, env: VectorEnv, directory: RunDirectory, peers: Crew,
                 checkpoint: Checkpoint | None, post: Post) -> None:
        self.config, self.env, self.directory, self.peers, self.post = config, env, directory, peers, post
        chosen = peers.exchange(b"" if checkpoint is None else checkpoint.path.name.encode())[0].decode()
        if peers.rank and chosen:
            checkpoint = open_checkpoint(directory.checkpoints / chosen, verify=False)  # the first one did
        if checkpoint is not None:
            require_same(checkpoint, env.spec)
        self.checkpoint = checkpoint
        self.archive = Archive(peers, directory.path / "parts", checkpoint)

    def work(self, sinks: Sequence[Sink], origin: Mapping[str, Any], source: Checkpoint | None) -> TrainResult:
        with memory_advised(self.config), ExitStack() as stack:
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            if self.peers.rank == 0:
                return self._lead(sinks, origin, source, stack)
            return self._follow(stack)

    def _lead(self, sinks: Sequence[Sink], origin: Mapping[str, Any], source: Checkpoint | None,
              stack: ExitStack) -> TrainResult:
        spec, checkpoint = self.env.spec, self.checkpoint
        attempt = Attempt(self.config, spec, self.directory, sinks, lambda outside: self._build(outside, stack),
                          checkpoint)
        stack.callback(attempt.close)
        if checkpoint is None and source is not None:
            attempt.begin_from(source)
        attempt.open(dict(origin) if checkpoint is None else {**origin, "resumed_from": checkpoint.path.name})
        return concluded(self.directory, attempt.execute)

    def _follow(self, stack: ExitStack) -> TrainResult:
        keep_pages()
        torch.set_num_threads(self.config.run.threads or 1)
        quiet = Outside((), lambda snapshot: None, lambda score, progress, weights: True, lambda sample, update: None)
        rank = self._build(quiet, stack)
        if self.checkpoint is not None:
            rank.restore(self.checkpoint.state(), self.checkpoint.segments())
        with obeyed(rank.cell.stop):
            reason = rank.run()
        return _bystander(self.directory, reason)

    def _build(self, outside: Outside, stack: ExitStack) -> Rank:
        cast = cast_of(_shared_cores(self.config, self.peers.size), self.env, self.peers.rank)
        stack.callback(cast.close)
        inline = Inline(cast, self._plan(), replace(outside, save=self.archive.saver(outside.save)))
        bench, opening = None, self.post.opening
        if self.peers.rank == 0 and (opening is not None or self.peers.size > 1):
            bench = Gallery(self.config, self.env.spec, inline.cell, opening or beside(self.directory))
            stack.callback(bench.close)
        rank = Rank(inline, self.peers, self.config.allreduce, bench)
        self.archive.council = rank.council
        self._heed(lambda: setattr(rank.cell.stop, "reason", "preempted"), stack)
        return rank

    def _heed(self, leave: Callable[[], object], stack: ExitStack) -> None:
        if self.post.tie is not None:
            self.post.tie.on_orphan(leave)
        elif self.post.place is not None:
            stack.callback(when_orphaned(leave))

    def _plan(self) -> Plan:
        """Nothing is drawn from the same numbers on two ranks; the first draws as a run of one process would."""
        plan, rank = plan_of(self.config), self.peers.rank
        seed = seed_for(plan.seed, "rank", rank) if rank else plan.seed
        return replace(plan, seed=seed, device=_device(self.config, self.post.place))
