"""The attempt of a run whose actors and learner are in this process: environment, run directory and roles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from qfleet.core.env import VectorEnv
from qfleet.core.errors import UserError
from qfleet.interface.arguments import assign_callbacks, check_sinks, progress_view, require_importable
from qfleet.launch.attempt import (
    Attempt,
    TrainResult,
    initial_weights,
    open_for_resume,
    require_same_env,
)
from qfleet.launch.new_run import new_run
from qfleet.launch.remote_evaluator import RemoteEvaluatorSlot, evaluator_process
from qfleet.report.progress import ProgressView
from qfleet.runconfig.auto import resolve_auto
from qfleet.runconfig.build import make_acting_setup, make_env, make_plan
from qfleet.runconfig.run_config import RunConfig
from qfleet.runs.directory import RunDirectory
from qfleet.training.callbacks import CheckedCallback
from qfleet.training.learner_core import Hooks
from qfleet.training.learner_run import LearnerRun
from qfleet.training.meter import Sink


@dataclass(frozen=True)
class LocalRunParts:
    """Config, sinks and callbacks of a run in this process. `view` is the sink that shows the progress."""

    config: RunConfig
    sinks: Sequence[Sink]
    callbacks: Sequence[CheckedCallback]
    view: ProgressView | None

    @classmethod
    def check(cls, config: RunConfig, sinks: Sequence[Any], callbacks: Sequence[Any], progress: bool) -> LocalRunParts:
        """Check the arguments of a run before anything is built; UserError if it needs other processes."""
        if others := [text for text in config.process_settings() if text != "eval.process=true"]:
            raise UserError(f"qfleet.Run trains in this process, and {others[0]} starts others: use qfleet.train")
        require_importable(config)
        config, checked = assign_callbacks(config, callbacks)
        receivers, view = check_sinks(sinks), progress_view(config) if progress else None
        return cls(config, [*receivers, *([] if view is None else [view])], checked, view)


@dataclass(frozen=True)
class OpenedRun:
    """A run that was created or reopened: an attempt, or the result if nothing is left to do."""

    config: RunConfig
    directory: RunDirectory
    attempt: Attempt[LearnerRun] | None
    result: TrainResult | None = None


def create(parts: LocalRunParts, provenance: Mapping[str, str], stack: ExitStack) -> OpenedRun:
    """Create a run; the stack closes its environments and files and unlocks or discards its directory."""
    env = _make_env(parts.config, stack)
    config = resolve_auto(parts.config, env.spec)
    source = initial_weights(config, env.spec)
    directory = stack.enter_context(new_run(config))
    attempt = Attempt(config, env.spec, directory, parts.sinks, _builder(config, env, directory, stack),
                      callbacks=parts.callbacks)
    return OpenedRun(config, directory, stack.enter_context(attempt.opened({"sources": dict(provenance)}, source)))


def reopen(directory: RunDirectory, parts: LocalRunParts, stack: ExitStack) -> OpenedRun:
    """Continue a run from its newest valid checkpoint; the stack closes it, as for `create`."""
    checkpoint, result = open_for_resume(directory, parts.config, stack)
    if result is not None:
        stack.close()  # and unlock the directory
        return OpenedRun(parts.config, directory, None, result)
    env = _make_env(parts.config, stack)
    if checkpoint is not None:
        require_same_env(checkpoint, env.spec)
    config = resolve_auto(parts.config, env.spec)
    source = initial_weights(config, env.spec) if checkpoint is None else None
    attempt = Attempt(config, env.spec, directory, parts.sinks, _builder(config, env, directory, stack), checkpoint,
                      parts.callbacks)
    return OpenedRun(config, directory, stack.enter_context(attempt.opened({}, source)))


def _make_env(config: RunConfig, stack: ExitStack) -> VectorEnv:
    env = make_env(config.env, config.env.lanes, stall_timeout_s=config.run.stall_timeout_s)
    stack.callback(env.close)
    return env


def _builder(config: RunConfig, env: VectorEnv, directory: RunDirectory,
             stack: ExitStack) -> Callable[[Hooks], LearnerRun]:
    """Function that builds the roles; the stack closes their environments and ends the evaluator's process."""
    def build(hooks: Hooks) -> LearnerRun:
        setup = make_acting_setup(config, env)
        stack.callback(setup.close)
        if not config.evaluator_process:
            return LearnerRun(setup, make_plan(config), hooks)
        return LearnerRun(setup, make_plan(config), hooks,
                          make_evaluator=partial(evaluator_process, config, directory, stack))

    return build


def evaluator_failure(run: LearnerRun) -> Exception | None:
    """Why the evaluator's process of a run cannot go on, if it has one."""
    return run.evaluator.failure if isinstance(run.evaluator, RemoteEvaluatorSlot) else None


class TorchState:
    """Torch's number of threads and global generator as a run uses them, apart from those of the calling program."""

    def __init__(self, threads: int, rng: torch.Tensor | None = None) -> None:
        self._threads, self._rng = threads, torch.get_rng_state() if rng is None else rng

    def with_threads(self, threads: int) -> TorchState:
        """The same generator with another number of threads."""
        return TorchState(threads, self._rng)

    @contextmanager
    def active(self, keep: bool = True) -> Iterator[None]:
        """Use the run's state, then restore the caller's. Without `keep` the run's generator does not advance."""
        threads, rng = torch.get_num_threads(), torch.get_rng_state()
        torch.set_num_threads(self._threads)
        torch.set_rng_state(self._rng)
        try:
            yield
        finally:
            if keep:
                self._rng = torch.get_rng_state()
            torch.set_rng_state(rng)
            torch.set_num_threads(threads)
