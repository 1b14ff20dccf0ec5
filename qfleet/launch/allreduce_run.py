"""Synchronous data-parallel training: a rank of a run.

    torchrun ... -m qfleet train RECIPE sync=allreduce       the user starts the ranks; rank 0 creates the run
    srun ... qfleet train RECIPE sync=allreduce              the same
    qfleet train RECIPE sync=allreduce learners=N            the driver creates the run and starts the ranks (rank_node)

Rank 0 owns directory, metrics and checkpoints; the others contribute their parts. All ranks share the run's folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from qfleet.config import load_attribute
from qfleet.core.env import EnvSpec, VectorEnv
from qfleet.core.errors import UserError
from qfleet.core.seeds import seed_for
from qfleet.launch.actor_service import ActorService
from qfleet.launch.attempt import (
    Attempt,
    TrainResult,
    advise_on_oom,
    initial_weights,
    open_for_resume,
    record_outcome,
    require_same_env,
)
from qfleet.launch.final_score import score_result
from qfleet.launch.new_run import new_run
from qfleet.launch.remote_evaluator import RemoteEvaluator, supervised_evaluator
from qfleet.launch.run_request import RunRequest
from qfleet.launch.serving import RunServing, Serving
from qfleet.process.heartbeat import Heartbeat
from qfleet.process.memory import retain_freed_memory
from qfleet.process.parent_watch import on_parent_exit
from qfleet.process.signals import EXIT_CODES, stop_on_signal
from qfleet.runconfig.auto import resolve_auto
from qfleet.runconfig.build import make_acting_setup, make_agent, make_env, make_plan, with_env_threads
from qfleet.runconfig.run_config import RunConfig
from qfleet.runs.checkpoint import Checkpoint, Checkpoints, open_checkpoint
from qfleet.runs.directory import RunDirectory
from qfleet.runs.membership import write_members_of
from qfleet.runs.names import run_names
from qfleet.sync.process_group import ProcessGroup, RankInfo, process_group
from qfleet.training.callbacks import CheckedCallback
from qfleet.training.evaluation import EvaluatorSlot
from qfleet.training.learner_core import SILENT_HOOKS, Hooks, LearnerCore
from qfleet.training.learner_run import RunSetup
from qfleet.training.loop import TrainingPlan
from qfleet.training.meter import Sink
from qfleet.training.rank_run import BuildGradientSync, RankConsensus, RankRun, build_allreduce
from qfleet.training.sharded_checkpoint import ShardedCheckpointWriter


def is_rank(config: RunConfig) -> bool:
    """True if the user's torchrun or srun started this process as a rank."""
    return config.synchronous and config.is_local and RankInfo.from_environment() is not None


def start(config: RunConfig, sinks: Sequence[Sink], callbacks: Sequence[CheckedCallback],
          provenance: Mapping[str, str]) -> TrainResult:
    """Train a new run: as a rank that torchrun or srun started, or as the only one. Rank 0 calls the callbacks."""
    rank_info = RankInfo.from_environment()
    size, learners_here = _size(config, rank_info), local_size(rank_info)
    learners = config.learners
    if rank_info and learners not in (1, size):
        raise UserError(f"learners={learners}, but {size} ranks were started: leave learners out, or call "
                        "qfleet without torchrun or srun, so that it starts the ranks itself")
    with connect_ranks(config, rank_info) as peers, open_env(config, learners_here) as env:
        config = resolve_auto(config.model_copy(update={"learners": size}), env.spec, learners_here)
        source = initial_weights(config, env.spec)
        with ExitStack() as stack:
            directory = _run_directory(config, peers, stack)
            trainer = RankTrainer(
                config, env, directory, peers, None if peers.rank else _newest(config, directory),
                RankContext(rank_info, callbacks=callbacks))
            origin = {"sources": dict(provenance), **_job()}
            return trainer.run(sinks, origin, source)


def resume(directory: RunDirectory, config: RunConfig, sinks: Sequence[Sink],
           callbacks: Sequence[CheckedCallback]) -> TrainResult:
    """Continue a run from its newest valid checkpoint, with the current number of ranks."""
    rank_info = RankInfo.from_environment()
    size, learners_here = _size(config, rank_info), local_size(rank_info)
    with connect_ranks(config, rank_info) as peers, ExitStack() as stack:
        checkpoint, finished = (None, None) if peers.rank else open_for_resume(directory, config, stack)
        if any(peers.exchange(b"" if finished is None else b"ended")):
            return finished or _follower_result(directory, "total_steps")
        with open_env(config, learners_here) as env:
            config = resolve_auto(config.model_copy(update={"learners": size}), env.spec, learners_here)
            source = initial_weights(config, env.spec) if checkpoint is None and peers.rank == 0 else None
            context = RankContext(rank_info, callbacks=callbacks)
            return RankTrainer(config, env, directory, peers, checkpoint, context).run(sinks, _job(), source)


def gradient_sync_builder(config: RunConfig) -> BuildGradientSync:
    """What creates the gradient synchronisation of a rank; UserError if the user's cannot be called."""
    rule = config.sync
    if ":" not in rule:
        return build_allreduce(config.allreduce)
    build = load_attribute(rule)
    if not callable(build):
        raise UserError(f"sync={rule}: this is a {type(build).__name__}; name a class or function that takes "
                        "optimizer settings and a RankLink (qfleet/sync/allreduce.py) and returns a GradientSync")
    return build


def _size(config: RunConfig, rank_info: RankInfo | None) -> int:
    """Number of ranks; UserError if the config asks for processes that torchrun and srun do not start."""
    if not config.learners_act:
        raise UserError(f"actors={config.actors} with ranks that torchrun or srun started: set actors=0, so that each "
                        "rank acts, or call qfleet without them, so that it starts ranks and actors")
    gradient_sync_builder(config)
    return rank_info.size if rank_info else 1


@dataclass(frozen=True)
class RankContext:
    """Environment of a rank: its position, its heartbeat, the environment's spec, and how it serves its members.

    `serving` serves the rank's actors, if they are other processes, and on rank 0 the evaluator; rank 0 reports its
    result to it. Without a driver there is neither: a rank stops when its parent process is gone, finds out the spec
    by itself, and rank 0 starts the evaluator.
    """

    rank_info: RankInfo | None
    heartbeat: Heartbeat | None = None
    spec: EnvSpec | None = None
    serving: RunServing | None = None
    callbacks: Sequence[CheckedCallback] = ()


def train_rank(run_request: RunRequest, context: RankContext) -> TrainResult:
    """Train as one rank of a run that a driver has prepared, from its newest checkpoint if there is one."""
    directory, config = run_request.run, run_request.config()
    with connect_ranks(config, context.rank_info) as peers, ExitStack() as stack:
        env = stack.enter_context(open_env(config, local_size(context.rank_info))) if config.learners_act else None
        spec = EnvSpec.from_json(run_request.spec)
        checkpoint = None if peers.rank else _newest(config, directory)
        source = initial_weights(config, spec) if checkpoint is None and peers.rank == 0 else None
        trainer = RankTrainer(config, env, directory, peers, checkpoint, replace(context, spec=spec))
        return trainer.run((), run_request.origin, source)


@contextmanager
def connect_ranks(config: RunConfig, rank_info: RankInfo | None) -> Iterator[ProcessGroup]:
    with process_group(rank_info, _device(config, rank_info), config.allreduce.timeout_s) as peers:
        yield peers


@contextmanager
def open_env(config: RunConfig, learners_here: int) -> Iterator[VectorEnv]:
    """First environment of this rank; the ranks of a host share its CPU cores."""
    with closing(make_env(with_env_threads(config, learners_here).env, config.env.lanes,
                          stall_timeout_s=config.run.stall_timeout_s)) as env:
        yield env


def local_size(rank_info: RankInfo | None) -> int:
    """Number of ranks on this host."""
    return rank_info.local_size if rank_info else 1


def _device(config: RunConfig, rank_info: RankInfo | None) -> torch.device:
    """Device of a rank: on GPUs each rank of a host has its own."""
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and rank_info is not None:
        return torch.device("cuda", rank_info.local_rank % max(1, torch.cuda.device_count()))
    return torch.device(name)


def _run_directory(config: RunConfig, peers: ProcessGroup, stack: ExitStack) -> RunDirectory:
    """Run directory: rank 0 creates it, or finds the one of an earlier attempt of this job."""
    path = b""
    if peers.rank == 0:
        place = RankInfo.from_environment()
        directory = _directory_of_earlier_attempt(config) if place is not None and place.attempt else None
        if directory is None:
            directory = stack.enter_context(new_run(config))
        else:
            directory.lock()
            stack.callback(directory.unlock)
        path = str(directory.path).encode()
    return RunDirectory(Path(peers.exchange(path)[0].decode()))


def _job() -> dict[str, str]:
    """Identity of this job: the torchrun agent that started this process, or its Slurm step."""
    if RankInfo.from_environment() is None:
        return {}
    agent = f"{os.uname().nodename}/{os.getppid()}"
    if "SLURM_STEP_ID" in os.environ:  # a step has several agents, and rank 0 may belong to any
        agent = f"slurm/{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"
    return {"torchrun": f"{agent}/{os.environ.get('TORCHELASTIC_RUN_ID', '')}"}


def _directory_of_earlier_attempt(config: RunConfig) -> RunDirectory | None:
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


def _follower_result(directory: RunDirectory, reason: str) -> TrainResult:
    """Result of a run as returned by a rank other than 0, which keeps no metrics."""
    return TrainResult(directory.path, 0, 0, 0, 0.0, None, reason, EXIT_CODES.get(reason, 0))


def spec_of(env: VectorEnv | None, context: RankContext) -> EnvSpec:
    spec = context.spec if env is None else env.spec
    assert spec is not None
    return spec


class RankTrainer:
    """Trains as one rank of a run. Only rank 0 is given the checkpoint; it sends its name to the others.

    `env` is the rank's first environment; None: its actors are other processes.
    """

    def __init__(self, config: RunConfig, env: VectorEnv | None, directory: RunDirectory, peers: ProcessGroup,
                 checkpoint: Checkpoint | None, context: RankContext) -> None:
        self.config, self.env, self.directory, self.peers, self.context = config, env, directory, peers, context
        self.spec = spec_of(env, context)
        chosen = peers.exchange(b"" if checkpoint is None else checkpoint.path.name.encode())[0].decode()
        if peers.rank and chosen:
            checkpoint = open_checkpoint(directory.checkpoints / chosen, verify=False)  # rank 0 did
        if checkpoint is not None:
            require_same_env(checkpoint, self.spec)
        self.checkpoint = checkpoint
        self.service = ActorService(config, self.spec, peers.rank) if env is None else None

    def run(self, sinks: Sequence[Sink], origin: Mapping[str, Any], source: Checkpoint | None) -> TrainResult:
        with advise_on_oom(self.config), ExitStack() as stack:
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            if self.peers.rank == 0:
                return self._run_rank_zero(sinks, origin, source, stack)
            return self._run_follower(stack)

    def _run_rank_zero(self, sinks: Sequence[Sink], origin: Mapping[str, Any], source: Checkpoint | None,
                       stack: ExitStack) -> TrainResult:
        attempt = Attempt(self.config, self.spec, self.directory, sinks, lambda hooks: self._build(hooks, stack),
                          self.checkpoint, self.context.callbacks)
        stack.enter_context(attempt.opened(origin, source))
        with self._serving():
            result = record_outcome(self.directory, attempt.execute)
            if self.context.serving is None:
                return score_result(result, self.config, sinks)
            self.context.serving.report_result(result)  # the driver scores the best policy
            return result

    def _run_follower(self, stack: ExitStack) -> TrainResult:
        retain_freed_memory()
        torch.set_num_threads(self.config.run.threads or 1)
        write_members = partial(write_members_of, self.directory.path, self.peers.rank)
        rank = self._build(replace(SILENT_HOOKS, write_members=write_members), stack)
        if self.checkpoint is not None:
            rank.restore(self.checkpoint.state(), self.checkpoint.segments())
        with stop_on_signal(rank.core.stop), self._serving():
            reason = rank.run()
        return _follower_result(self.directory, reason)

    @contextmanager
    def _serving(self) -> Iterator[None]:
        """Serve this rank's actors, if they are other processes; at the end they are told that the run is over."""
        if self.service is None:
            yield
            return
        service, serving = self.service, self.context.serving
        assert serving is not None, "ranks of torchrun and srun act"
        with serving(service.published, service.registry, service.inbox, self.config):
            yield
            service.end()

    def _setup(self, stack: ExitStack) -> RunSetup:
        if self.service is not None:
            return self.service.setup(make_agent(self.config, self.spec))
        assert self.env is not None
        setup = make_acting_setup(with_env_threads(self.config, local_size(self.context.rank_info)), self.env,
                                  self.peers.rank)
        stack.callback(setup.close)
        return setup

    def _build(self, hooks: Hooks, stack: ExitStack) -> RankRun:
        setup = self._setup(stack)
        plan = self._plan()
        consensus = RankConsensus(self.peers, plan)
        checkpoints = ShardedCheckpointWriter(consensus, self.directory.path / "parts", self.checkpoint)

        def make_backend(core: LearnerCore) -> EvaluatorSlot | None:
            if self.peers.rank or self.service is not None or not self.config.evaluator_process:
                return None
            serving: Serving = self.context.serving or supervised_evaluator(self.directory)
            remote = RemoteEvaluator(self.config, setup.spec, core, serving)
            stack.callback(remote.close)
            return remote

        hooks = replace(hooks, save=checkpoints.saver(hooks.save))
        rank = RankRun(setup, plan, hooks, consensus, gradient_sync_builder(self.config), make_backend)
        self._stop_when_orphaned(lambda: consensus.stop.request("preempted"), stack)
        return rank

    def _stop_when_orphaned(self, leave: Callable[[], object], stack: ExitStack) -> None:
        if self.context.heartbeat is not None:
            self.context.heartbeat.on_orphan(leave)
        elif self.context.rank_info is not None:
            stack.callback(on_parent_exit(leave))

    def _plan(self) -> TrainingPlan:
        """Training plan of this rank. Ranks draw from different seeds; rank 0 draws as a single-process run would."""
        rank_info, rank = self.context.rank_info, self.peers.rank
        plan = make_plan(self.config, local_size(rank_info))
        seed = seed_for(plan.seed, "rank", rank) if rank else plan.seed
        return replace(plan, seed=seed, device=_device(self.config, rank_info))
