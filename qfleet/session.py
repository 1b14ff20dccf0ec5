"""One attempt at a run: directory, writers and checkpoints around the roles, from the first step to the exit code."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from qfleet.assemble import cast_of, describe_plan, make_env, plan_of, settle
from qfleet.config import to_yaml
from qfleet.roles.checkpointer import Snapshot
from qfleet.roles.evaluator import Score
from qfleet.roles.metrics import Sink
from qfleet.roles.schedule import Progress
from qfleet.runs.checkpoint import Checkpoint, Checkpoints, Meta
from qfleet.runs.directory import RunDirectory, default_name, describe, replace_text
from qfleet.runs.find import find_checkpoint
from qfleet.runs.writers import JsonlWriter, TensorBoardWriter, WandbWriter
from qfleet.runtime.cell import Outside
from qfleet.runtime.inline import Inline
from qfleet.runtime.memory import keep_pages
from qfleet.runtime.signals import obeyed
from qfleet.settings import RunConfig
from qfleet.types import EnvSpec, Sample, UserError, VectorEnv

log = logging.getLogger(__name__)

EXIT_CODES = {"interrupted": 130, "preempted": 75}
BAD_BATCHES_KEPT = 3


@dataclass(frozen=True)
class TrainResult:
    """How a training ended. `exit_code` is what the command line returns for it.

    `saved_at` is the step of the checkpoint that it would go on from, None if there is none.
    """

    directory: Path
    steps: int
    updates: int
    episodes: int
    seconds: float
    best: float | None
    reason: str
    exit_code: int
    saved_at: int | None = None


def start(config: RunConfig, sinks: Sequence[Sink], provenance: Mapping[str, str]) -> TrainResult:
    """Train a new run."""
    with ExitStack() as stack:
        env = make_env(config.env, config.env.lanes, stall_timeout_s=config.run.stall_timeout_s)
        stack.callback(env.close)
        config = settle(config, env.spec)
        weights = _initial_weights(config, env.spec)
        directory = RunDirectory.create(config.run, default_name(config.env.id, config.agent.algo, config.seed))
        stack.callback(directory.unlock)
        stack.callback(torch.set_num_threads, torch.get_num_threads())  # the caller's, not ours
        try:
            attempt = Attempt(config, env, directory, sinks)
            stack.callback(attempt.close)
            if weights is not None:
                attempt.begin_from(weights)
            attempt.open({"sources": dict(provenance)})
        except BaseException:
            directory.discard()  # or its name would be taken by a run that never began
            raise
        return attempt.execute()


def go_on(directory: RunDirectory, config: RunConfig, sinks: Sequence[Sink]) -> TrainResult:
    """Continue a run from its newest valid checkpoint, with a config that may have changed in what may change."""
    with ExitStack() as stack:
        directory.lock()
        stack.callback(directory.unlock)
        checkpoint = Checkpoints(directory.checkpoints, config.checkpoint.keep).newest()
        if checkpoint is None:
            raise UserError(f"{directory.path} has no valid checkpoint to resume from: start anew with `qfleet train "
                            f"{directory.config}` and another run.name")
        env = make_env(config.env, config.env.lanes, stall_timeout_s=config.run.stall_timeout_s)
        stack.callback(env.close)
        require_same(checkpoint, env.spec)
        config = settle(config, env.spec)
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        attempt = Attempt(config, env, directory, sinks, checkpoint)
        stack.callback(attempt.close)
        attempt.open({"resumed_from": checkpoint.path.name})
        return attempt.execute()


def _introduce(directory: RunDirectory, config: RunConfig, origin: Mapping[str, Any]) -> None:
    """Write down what is about to be run."""
    try:
        replace_text(directory.config, to_yaml(config))
        directory.add_attempt(describe() | dict(origin))
    except OSError as error:
        raise UserError(f"cannot write to the run {directory.path}: {error.strerror}; make room there, or choose "
                        "another folder with run.root") from error


def require_same(checkpoint: Checkpoint, spec: EnvSpec) -> None:
    """Refuse weights that were trained on other observations or actions."""
    was, now = checkpoint.spec, spec
    if was.observation != now.observation or was.actions != now.actions:
        raise UserError(f"checkpoint {checkpoint.path} was trained on {was.id} with {was.actions} actions and "
                        f"observations {dict(was.observation)}; the environment {now.id} has {now.actions} actions "
                        f"and observations {dict(now.observation)}")


def _initial_weights(config: RunConfig, spec: EnvSpec) -> dict[str, torch.Tensor] | None:
    if config.init_from is None:
        return None
    checkpoint = find_checkpoint(config.init_from, root=config.run.root, trust=True)  # only its weights are used
    require_same(checkpoint, spec)
    return checkpoint.policy()


class Attempt:
    """The roles of a run and all that surrounds them, ready to go."""

    def __init__(self, config: RunConfig, env: VectorEnv, directory: RunDirectory, sinks: Sequence[Sink],
                 checkpoint: Checkpoint | None = None) -> None:
        keep_pages()
        torch.set_num_threads(config.run.threads or 1)
        self.config, self.directory, self.spec = config, directory, env.spec
        self.store = Checkpoints(directory.checkpoints, config.checkpoint.keep)
        self.text = to_yaml(config)
        self.sinks: list[Sink] = []
        self.guests, self.resume_step = sinks, checkpoint.manifest.step if checkpoint else None
        for sink in sinks:
            show: Callable[[list[tuple[str, str]]], None] | None = getattr(sink, "plan", None)
            if show is not None:
                show([("run", str(directory.path)), *describe_plan(config, env.spec)])
        self.cast = cast_of(config, env)
        outside = Outside(self.sinks, self._save, self._save_best, self._keep_bad)
        try:
            self.run = Inline(self.cast, plan_of(config), outside)
            self.cell = self.run.cell
            if checkpoint is not None:
                self._restore(checkpoint)
        except BaseException:
            self.cast.close()
            raise

    def begin_from(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Start from trained weights instead of random ones."""
        try:
            self.cell.learner.load_weights(weights)
        except ValueError as error:
            raise UserError(f"init_from={self.config.init_from}: its network is another one ({error}); set the agent's "
                            "keys as they were there, see `qfleet config diff`") from error

    def open(self, origin: Mapping[str, Any]) -> None:
        """Write down what is about to be run and open its records; before this, nothing on the disk has changed."""
        if self.config.run.wandb:  # first, since it may be missing
            self.sinks.append(WandbWriter(self.directory.path, self.directory.name,
                                          self.config.model_dump(mode="json")))
        _introduce(self.directory, self.config, origin)
        if self.config.run.tensorboard:
            self.sinks.append(TensorBoardWriter(self.directory.tensorboard, self.resume_step))
        self.sinks.append(JsonlWriter(self.directory.metrics, self.resume_step))
        self.sinks.extend(self.guests)

    def close(self) -> None:
        """Let go of the records and of the environments."""
        self.cell.meter.close()
        self.cast.close()

    def execute(self) -> TrainResult:
        """Train until the run ends or is told to."""
        with obeyed(self.cell.stop):
            reason = self.run.run()
        now = self.cell.progress()
        code = 1 if self.run.checkpointer.failed else EXIT_CODES.get(reason, 0)
        saved = self.run.checkpointer.saved_at
        return TrainResult(self.directory.path, now.steps, now.updates, self.cell.meter.episodes,
                           self.cell.meter.seconds, self.cell.best, reason, code, saved.steps if saved else None)

    def _restore(self, checkpoint: Checkpoint) -> None:
        try:
            self.run.restore(checkpoint.state(), checkpoint.segments())
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"checkpoint {checkpoint.path} does not fit this run: {error}") from error
        self.store.follow(checkpoint)

    def _save(self, snapshot: Snapshot) -> None:
        steps, updates = snapshot.progress
        self.store.save(steps, updates, snapshot.policy, snapshot.state, snapshot.segments,
                        Meta(self.text, self.spec))

    def _save_best(self, score: Score, progress: Progress, weights: dict[str, torch.Tensor]) -> bool:
        notes = {"mean_reward": score.mean, "std_reward": score.std, "episodes": float(len(score.returns))}
        try:
            self.store.save_policy(progress.steps, score.version, weights, Meta(self.text, self.spec, notes))
        except OSError as error:
            self.cell.meter.count("fault/checkpoints_failed")
            log.warning("the best policy at step %d could not be saved (%s)", progress.steps, error)
            return False
        return True

    def _keep_bad(self, sample: Sample, update: int) -> None:
        """Keep the first batches whose loss was not finite, for people to look at."""
        folder = self.directory.path / "faults"
        path = folder / f"bad-batch-after-update-{update}.safetensors"
        if path.exists() or (folder.exists() and len(list(folder.iterdir())) >= BAD_BATCHES_KEPT):
            return
        arrays: dict[str, Any] = {name: rows.cpu().contiguous() for name, rows in sample.rows.items()}
        try:
            folder.mkdir(exist_ok=True)
            safetensors.torch.save_file(arrays | {"weight": sample.weight.cpu(), "keys": torch.as_tensor(sample.keys)},
                                        path)
            log.warning("loss or gradient was not finite after update %d; the batch is in %s", update, path)
        except (OSError, RuntimeError, safetensors.SafetensorError) as error:
            log.warning("a bad batch could not be kept (%s)", error)
