"""One attempt at a run: directory, metric writers and checkpoints around the roles, from start to exit code."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

import safetensors.torch
import torch

from qfleet.actor.policy import Policy
from qfleet.config import to_yaml
from qfleet.core.clock import Progress
from qfleet.core.env import EnvSpec
from qfleet.core.errors import CallbackError, ProcessFault, RunLost, UserError
from qfleet.core.evaluation import Score
from qfleet.core.replay import Sample
from qfleet.core.tracebacks import user_traceback
from qfleet.launch.train_result import TrainResult
from qfleet.learner.learner import Diverged
from qfleet.process.memory import out_of_memory_text, retain_freed_memory
from qfleet.process.signals import EXIT_CODES, Stoppable, stop_on_signal
from qfleet.report.eval_video import EvalVideoRecorder
from qfleet.runconfig.build import make_callbacks
from qfleet.runconfig.plan_text import describe_plan
from qfleet.runconfig.run_config import RunConfig
from qfleet.runs.checkpoint import Checkpoint, CheckpointMeta, Checkpoints
from qfleet.runs.directory import RunDirectory, describe_machine, replace_text
from qfleet.runs.find import find_checkpoint
from qfleet.runs.hparams import hparam_summaries
from qfleet.runs.membership import remove_members_of_learners, write_members
from qfleet.runs.metric_writers import JsonlWriter, TensorBoardWriter, WandbWriter, moment_of, read_metrics
from qfleet.runs.mlflow_writer import MlflowWriter
from qfleet.runs.presence import DirectoryGuard
from qfleet.runs.run_log import RunLog
from qfleet.runs.transfer import matching_weights
from qfleet.training.callbacks import CheckedCallback
from qfleet.training.checkpointer import CheckpointWriter, Snapshot
from qfleet.training.learner_core import Hooks, LearnerCore
from qfleet.training.meter import GuardedSink, Sink

log = logging.getLogger(__name__)

FINAL_ERRORS = (Diverged, RunLost, CallbackError)
"""Errors of a learner that a restart would not cure."""

BAD_BATCHES_KEPT = 3


def record_outcome(directory: RunDirectory, work: Callable[[], TrainResult]) -> TrainResult:
    """Execute an attempt, and record in the run directory how it ended."""
    with recording_failure(directory):
        result = work()
    record_result(directory, result)
    return result


@contextmanager
def recording_failure(directory: RunDirectory) -> Iterator[None]:
    """Record an exception in the run directory as the end of the run."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) or (not isinstance(error, RunLost) and directory.ending() is None):
            _record_error(directory, error)
        raise


def _record_error(directory: RunDirectory, error: BaseException) -> None:
    if isinstance(error, KeyboardInterrupt):
        directory.conclude("interrupted")
    else:
        kind = "" if isinstance(error, UserError | ProcessFault | CallbackError) else f"{type(error).__name__}: "
        directory.conclude("failed", f"{kind}{headline(error)}".removesuffix(": "))


def record_result(directory: RunDirectory, result: TrainResult) -> None:
    if result.exit_code == 1:
        directory.conclude("failed", "the last checkpoint could not be saved")
    else:
        directory.conclude(result.reason, score=result.score)


def headline(error: BaseException) -> str:
    """First line of an error's text, and the next one if the first ends with a colon."""
    first, _, rest = str(error).partition("\n")
    return f"{first} {rest.partition(chr(10))[0].strip()}" if first.endswith(":") and rest else first


def describe_final_error(error: BaseException) -> str:
    """Message of one of `FINAL_ERRORS`; the traceback of the user's code that caused it is logged."""
    if isinstance(error, CallbackError) and error.__cause__ is not None:
        log.error("%s", user_traceback(error.__cause__))
    return f"training failed: {error}"


def open_for_resume(directory: RunDirectory, config: RunConfig,
                    stack: ExitStack) -> tuple[Checkpoint | None, TrainResult | None]:
    """Lock a run, and return its newest valid checkpoint, and its result if nothing is left to do.

    A run that died before its first checkpoint has none, and starts again from its first step.
    """
    directory.lock()
    stack.callback(directory.unlock)
    checkpoint = Checkpoints(directory.checkpoints, config.checkpoint.keep).newest()
    if checkpoint is not None:
        if not directory.has_id(checkpoint.manifest.run):
            raise UserError(f"{checkpoint.path} is a checkpoint of another run: move it out of {directory.checkpoints} "
                            f"and resume, or start a new run with its weights, init_from={checkpoint.path}")
        return checkpoint, finished_result(directory, config, checkpoint)
    if removed := directory.entry("checkpoints_removed"):
        raise UserError(f"the checkpoints of {directory.path} were removed ({removed}), and its best policy cannot be "
                        f"resumed: start a new run with its weights, init_from={directory.path}")
    if damaged := sorted(path.name for path in directory.checkpoints.glob("step-*")):
        raise UserError(f"{directory.path} has no valid checkpoint to resume from, only {', '.join(damaged)}: start "
                        f"a new run with `qfleet train {directory.config}` and another run.name")
    log.warning("%s has no checkpoint yet: it starts again from its first step", directory.path)
    return None, None


def finished_result(directory: RunDirectory, config: RunConfig, checkpoint: Checkpoint) -> TrainResult | None:
    """Result of a run that has nothing left to do under this config; None if work remains, be it an evaluation."""
    steps, updates = moment = checkpoint.manifest.moment
    records = [record for record in read_metrics(directory.metrics) if moment_of(record) <= moment]
    evaluated = next((record for record in reversed(records) if "eval/mean_reward" in record), None)
    if evaluated is None:
        return None
    best = evaluated.get("eval/best_reward")
    solved = config.stop_at is not None and best is not None and best >= config.stop_at
    ends = {"stop_at": solved, "total_steps": steps >= config.total_steps,
            "total_updates": config.total_updates is not None and updates >= config.total_updates}
    reason = next((name for name, reached in ends.items() if reached), None)
    version = evaluated.get("eval/updates", evaluated.get("updates"))  # of the weights: a score may arrive later
    if reason is None or not (solved or (evaluated.get("step"), version) == (steps, updates)):
        return None
    return TrainResult(directory.path, steps, updates, records[-1].get("episodes", 0), records[-1].get("time_s", 0.0),
                       best, reason, 0, steps, already_finished=True, score=directory.final_score())


@contextmanager
def advise_on_oom(config: RunConfig) -> Iterator[None]:
    """Add the config keys that determine memory use to an out-of-memory error."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        error.add_note(f"lower learner.batch_size={config.learner.batch_size} or the widths of agent.hidden, set "
                       "replay.store=host, free memory on the GPU (nvidia-smi lists its processes), or set device=cpu")
        raise
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and out_of_memory_text(error) is None:
            raise
        error.add_note(f"lower replay.capacity={config.replay.capacity} or env.lanes={config.env.lanes}, or "
                       f"learner.batch_size={config.learner.batch_size} or the widths of agent.hidden, or set "
                       "replay.max_bytes")
        raise


def _record_attempt(directory: RunDirectory, config: RunConfig, origin: Mapping[str, Any], known: str | None) -> str:
    """Write config and attempt to the run directory; returns the run's id. `known` is the id in a checkpoint."""
    try:
        run = directory.ensure_id(known)
        replace_text(directory.config, to_yaml(config))
        directory.add_attempt(describe_machine() | dict(origin))
        return run
    except OSError as error:
        raise UserError(f"cannot write to the run {directory.path}: {error.strerror}; make room there, or choose "
                        "another folder with run.root") from error


def require_same_env(checkpoint: Checkpoint, spec: EnvSpec) -> None:
    """UserError for weights that were trained on other observations or actions."""
    require_same_spaces(f"checkpoint {checkpoint.path} was trained on", checkpoint.spec, "the environment", spec)


def require_same_spaces(there: str, was: EnvSpec, here: str, now: EnvSpec) -> None:
    """UserError that describes both sides, unless their observation and action spaces are equal."""
    if was.observation != now.observation or was.num_actions != now.num_actions or was.box != now.box:
        raise UserError(f"{there} {was.id} with {was.action_text}, observing {was.observation_text}; "
                        f"{here} {now.id} has {now.action_text}, observing {now.observation_text}")


def initial_weights(config: RunConfig, spec: EnvSpec) -> Checkpoint | None:
    if config.init_from is None:
        return None
    checkpoint = find_checkpoint(config.init_from, root=config.run.root, trust=True)  # only its weights are used
    try:
        if not config.init_partial:
            require_same_env(checkpoint, spec)
    except UserError as error:
        raise UserError(f"{error}; init_partial=true loads the weights that fit") from None
    return checkpoint


class TrainingRun(Protocol):
    """Roles of a run: all in one process, or a learner whose actors are in other processes."""

    core: LearnerCore
    checkpoints: CheckpointWriter

    def run(self) -> str: ...
    def restore(self, state: Mapping[str, Any], segments: Iterable[tuple[str, Path]]) -> None: ...


def show_plan(sinks: Sequence[Sink], rows: list[tuple[str, str]]) -> None:
    """Pass (name, text) rows about the coming run to the sinks that display them."""
    for sink in sinks:
        show: Callable[[list[tuple[str, str]]], None] | None = getattr(sink, "plan", None)
        if show is not None:
            show(rows)


RunT = TypeVar("RunT", bound=TrainingRun)


class Attempt(Generic[RunT]):
    """The roles of a run, made by `build`, with directory, writers and checkpoints around them."""

    def __init__(self, config: RunConfig, spec: EnvSpec, directory: RunDirectory, sinks: Sequence[Sink],
                 build: Callable[[Hooks], RunT], checkpoint: Checkpoint | None = None,
                 callbacks: Sequence[CheckedCallback] = ()) -> None:
        retain_freed_memory()
        torch.set_num_threads(config.run.threads or 1)
        self.config, self.directory, self.spec = config, directory, spec
        self.store = Checkpoints(directory.checkpoints, config.checkpoint.keep)
        self.text = to_yaml(config)
        self.sinks: list[Sink] = []
        self.user_sinks, self._resume = sinks, checkpoint.manifest.moment if checkpoint else None
        self.id = checkpoint.manifest.run if checkpoint else None
        self.resumed_from = checkpoint.path if checkpoint else None
        if checkpoint is None and directory.metrics.exists():
            self._resume = (0, 0)  # the previous attempt died before its first checkpoint
        show_plan(sinks, [("run", str(directory.path)), *describe_plan(config, spec, directory.path)])
        self.video_recorder, self.presence = EvalVideoRecorder(config, directory.videos), DirectoryGuard(directory)
        self.run = build(Hooks(self.sinks, self._save, self._save_best, self._save_bad_batch, self._record_video,
                               partial(write_members, directory.path), lambda remembered: self.store.best_score(),
                               [*make_callbacks(config), *callbacks], directory.path))
        self.core = self.run.core
        if checkpoint is not None:
            self._restore(checkpoint)

    def load_initial_weights(self, checkpoint: Checkpoint) -> list[str]:
        """Start from trained weights instead of random ones. Returns one line for each tensor that did not fit."""
        learner, source = self.core.learner, self.config.init_from
        mine, given = learner.flat.state(), checkpoint.policy()
        wanted = {
            name: value for name, value in mine.items() if name in given or name not in learner.agent.eval_buffers
        }
        try:
            found = matching_weights(checkpoint, wanted, self.text, self.config.init_partial)
        except UserError as error:
            raise UserError(f"init_from={source}: {error}") from None
        learner.load_weights(mine | found.taken)
        if found.unfit:
            log.warning("init_from=%s: %d of %d tensors are loaded, these differ: %s", source, len(found.taken),
                        len(mine), "; ".join(found.unfit))
        return found.unfit

    @contextmanager
    def opened(self, origin: Mapping[str, Any], source: Checkpoint | None = None) -> Iterator[Self]:
        """Load the weights of `source` unless a checkpoint was restored, and open the attempt; at the end, close it."""
        try:
            if self.resumed_from is not None:
                origin = {**origin, "resumed_from": self.resumed_from.name}
            elif source is not None and (unfit := self.load_initial_weights(source)):
                origin = {**origin, "begun_anew": unfit}
            self._open(origin)
            yield self
        finally:
            self.core.meter.close()

    def _open(self, origin: Mapping[str, Any]) -> None:
        """Record the attempt and open the metric writers; before this, nothing on disk has changed."""
        if self.config.run.wandb:  # first, since the package may be missing
            self.sinks.append(WandbWriter(self.directory.path, self.directory.name,
                                          self.config.model_dump(mode="json")))
        if self.config.run.mlflow:
            self.sinks.append(MlflowWriter(self.directory, self.config.model_dump(mode="json")))
        self.id = _record_attempt(self.directory, self.config, origin, self.id)
        remove_members_of_learners(self.directory.path)
        if self.config.run.tensorboard:
            header = partial(hparam_summaries, self.config.model_dump(mode="json"), origin.get("sources", {}))
            self.sinks.append(TensorBoardWriter(self.directory.tensorboard, self._resume and self._resume[0], header))
        self.sinks.append(RunLog(self.directory.path, self.resumed_from.name if self.resumed_from else None))
        self.sinks.append(JsonlWriter(self.directory.metrics, self._resume))
        self.sinks.extend(map(GuardedSink, self.user_sinks))
        self.sinks.insert(0, self.presence)

    def record_callers_error(self, error: BaseException) -> None:
        """Record an exception of the calling program as the end of a run that was stopped because of it."""
        stopped = (self.directory.ending() or {}).get("reason") == "stopped"
        if stopped and isinstance(error, Exception | KeyboardInterrupt):
            _record_error(self.directory, error)

    def execute(self) -> TrainResult:
        """Train until the run ends or is stopped."""
        with self.stops_on_signal():
            reason = self.run.run()
        return self.result(reason)

    def stops_on_signal(self, stop: Stoppable | None = None) -> AbstractContextManager[None]:
        """While inside, signals end the run, or are passed to `stop`."""
        # With actors in other processes the driver handles the second SIGINT.
        return stop_on_signal(stop or self.core.stop, self.config.learners_act)

    def result(self, reason: str) -> TrainResult:
        """Result of a run that has ended."""
        self.presence.check()
        now = self.core.progress()
        code = 1 if self.run.checkpoints.failed else EXIT_CODES.get(reason, 0)
        saved = self.run.checkpoints.saved_at
        return TrainResult(self.directory.path, now.steps, now.updates, self.core.meter.episodes,
                           self.core.meter.seconds, self.core.best, reason, code, saved.steps if saved else None)

    def _restore(self, checkpoint: Checkpoint) -> None:
        try:
            self.run.restore(checkpoint.state(), checkpoint.segments())
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"checkpoint {checkpoint.path} does not fit this run: {error}") from error
        self.store.resume_from(checkpoint)

    def _save(self, snapshot: Snapshot) -> Path:
        self.presence.check()
        steps, updates = snapshot.progress
        return self.store.save(steps, updates, snapshot.policy, snapshot.state, snapshot.segments,
                        CheckpointMeta(self.text, self.spec, run=self.id))

    def _save_best(self, score: Score, progress: Progress, weights: dict[str, torch.Tensor]) -> bool:
        self.presence.check()
        notes = {"mean_reward": score.mean, "std_reward": score.std, "episodes": float(len(score.returns))}
        try:
            self.store.save_policy(
                progress.steps, score.version, weights, CheckpointMeta(self.text, self.spec, notes, self.id)
            )
        except OSError as error:
            self.core.meter.count("fault/checkpoints_failed")
            log.warning("the best policy at step %d could not be saved (%s)", progress.steps, error)
            return False
        return True

    def _record_video(self, policy: Policy, evaluation: int) -> None:
        self.video_recorder.record(policy, evaluation, self.core.progress().steps, lambda: self.core.stop.is_external)

    def _save_bad_batch(self, sample: Sample, update: int) -> None:
        """Save the first batches whose loss was not finite, for inspection."""
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
            log.warning("a bad batch could not be saved (%s)", error)
