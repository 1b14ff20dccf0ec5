"""Callbacks: functions of the user that a run calls after a round of its loop."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from qfleet.core.clock import Progress
from qfleet.core.episode import Episode
from qfleet.core.errors import CallbackError, UserError
from qfleet.core.evaluation import Score
from qfleet.core.tracebacks import raised_text
from qfleet.replay.view import ReplayView
from qfleet.runs.metric_writers import COUNTERS
from qfleet.training.checkpointer import CheckpointWriter
from qfleet.training.run_view import RunView

if TYPE_CHECKING:
    from qfleet.training.learner_core import LearnerCore

RESERVED = (*COUNTERS, "rollout/ep_rew_mean", "rollout/ep_rew_std", "rollout/ep_len_mean")
"""Tags that every record has of its own; those of evaluations begin with `eval/`."""


@dataclass(frozen=True)
class Evaluation:
    """A finished evaluation.

    Attributes:
        mean_reward: Mean return, unclipped.
        std_reward: Standard deviation of the returns.
        returns: Return of each episode.
        lengths: Length of each episode, steps.
        step: Environment steps of the run when the result arrived.
        updates: Updates of the weights that were evaluated.
        is_best: The mean is not lower than that of any earlier evaluation of the run.
    """

    mean_reward: float
    std_reward: float
    returns: Sequence[float]
    lengths: Sequence[int]
    step: int
    updates: int
    is_best: bool

    @classmethod
    def of(cls, score: Score, step: int, is_best: bool) -> Evaluation:
        """Describe a score of the evaluator.

        Args:
            score: Returns and lengths of the episodes.
            step: Environment steps of the run.
            is_best: True if no earlier evaluation had a higher mean.

        Returns:
            The event for callbacks.
        """
        return cls(score.mean, score.std, score.returns, score.lengths, step, max(0, score.version), is_best)


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that was written.

    Attributes:
        step: Environment steps of the run.
        updates: Updates of the run.
        path: Directory of the checkpoint; None without a run directory.
    """

    step: int
    updates: int
    path: Path | None


class Callback:
    """Base class of callbacks. Every method is optional. A class with the same methods also works without inheritance.

    After a round of the loop (one step of all lanes and the updates that are due), callbacks receive the events of
    the round in this order: `on_episode` for every episode, `on_evaluation`, `on_checkpoint`, then `on_step`. Several
    callbacks are called in the order in which they were given. `on_end` comes last, after the last checkpoint.

    Examples:
        >>> class Success(qfleet.Callback):
        ...     def on_episode(self, run, episode):
        ...         run.log({"success": episode.reward > 0})
        >>> result = qfleet.train("catch", callbacks=[Success()])
    """

    def on_start(self, run: RunControl) -> None:
        """Training starts or is resumed.

        Args:
            run: The run, to inspect and control.
        """

    def on_step(self, run: RunControl) -> None:
        """A round of the loop has ended: all lanes have made a step, or the messages of remote actors were handled.

        Args:
            run: The run, to inspect and control.
        """

    def on_episode(self, run: RunControl, episode: Episode) -> None:
        """A training episode has ended.

        Args:
            run: The run, to inspect and control.
            episode: Its return, length and info.
        """

    def on_evaluation(self, run: RunControl, evaluation: Evaluation) -> None:
        """An evaluation has finished.

        Args:
            run: The run, to inspect and control.
            evaluation: Returns and lengths of its episodes.
        """

    def on_checkpoint(self, run: RunControl, checkpoint: SavedCheckpoint) -> None:
        """A checkpoint was written.

        Args:
            run: The run, to inspect and control.
            checkpoint: Its step and path.
        """

    def on_end(self, run: RunControl, reason: str) -> None:
        """The run has ended.

        Args:
            run: The run, to inspect.
            reason: Why the run ended: `total_steps`, `total_updates`, `stop_at`, `stopped`, `interrupted`, ...
        """


HOOKS = {name: len(inspect.signature(method).parameters) - 1
         for name, method in vars(Callback).items() if name.startswith("on_")}
"""Number of arguments of each method."""


class RunControl(RunView):
    """The run as callbacks see it: progress, metrics, replay, network, and requests to the run.

    Attributes:
        total_steps: Length of the run in environment steps.
        directory: Run directory.
    """

    def __init__(self, core: LearnerCore, request_evaluation: Callable[[], None],
                 request_checkpoint: Callable[[], None], replay: ReplayView | None = None) -> None:
        """Created by the run.

        Args:
            core: Learner, replay and metrics.
            request_evaluation: Called by `request_evaluation`.
            request_checkpoint: Called by `request_checkpoint`.
            replay: View of the replay; None = that of the learner.
        """
        self._learner_core, self._replay = core, ReplayView(core.replay) if replay is None else replay
        self._request_evaluation, self._request_checkpoint = request_evaluation, request_checkpoint
        self.total_steps = core.plan.total_steps
        self.directory = core.hooks.directory

    @property
    def _core(self) -> LearnerCore:
        return self._learner_core

    @property
    def replay(self) -> ReplayView:
        """Replay buffer; `replay.sample(8)` does not affect the training.

        With sync=allreduce it is that of rank 0, and with sync=server it is empty: every learner has its own.
        """
        return self._replay

    @property
    def network(self) -> nn.Module:
        """The learner's network. It is being trained: copy its weights to keep them.

        With sync=server it has the weights of the last evaluation or checkpoint.
        """
        return super().network

    def log(self, metrics: Mapping[str, float]) -> None:
        """Add metrics to the next record. Values of the same tag within a log period are averaged.

        Args:
            metrics: Values by tag, such as `{"curriculum/level": 3}`.

        Raises:
            UserError: A tag is not text or is reserved, or a value is not a number.
        """
        self._core.meter.log({_tag(tag): _number(tag, value) for tag, value in metrics.items()})

    def stop(self) -> None:
        """End the run after this round, with a checkpoint; no effect on a run that is ending already."""
        self._core.stop.end_early()

    def request_evaluation(self) -> None:
        """Evaluate the newest weights in the next round, or as soon as a separate evaluator is free.

        Weights that were evaluated already are not evaluated again.
        """
        self._request_evaluation()

    def request_checkpoint(self) -> None:
        """Write a checkpoint in the next round."""
        self._request_checkpoint()

    def __repr__(self) -> str:
        return f"RunControl({self.steps:,} of {self.total_steps:,} steps, {self.updates:,} updates)"


def _tag(tag: Any) -> str:
    if not isinstance(tag, str) or not tag:
        raise UserError(f"log: {tag!r} cannot be the name of a metric: use text, such as \"curriculum/level\"")
    if tag in RESERVED or tag.startswith("eval/"):
        raise UserError(f"log: {tag!r} is reserved: use a name other than {', '.join(RESERVED)} and eval/...")
    return tag


def _number(tag: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UserError(f"log: {tag}={value!r} is not a number") from None


@dataclass(frozen=True)
class CheckedCallback:
    """A callback with its name for messages, and those of its methods that do something."""

    name: str
    hooks: Mapping[str, Callable[..., object]]


def check_callbacks(callbacks: Sequence[Any], create: bool = True) -> list[CheckedCallback]:
    """Check callbacks before training starts, so that none fails in the middle of it.

    Args:
        callbacks: Objects, or classes that are called without arguments.
        create: Create the objects of classes. Without, the result is only a check, for another process that trains.

    Raises:
        UserError: A callback cannot be called.
    """
    return [_checked(each, create) for each in callbacks]


def _checked(callback: Any, create: bool) -> CheckedCallback:
    name = getattr(callback, "__qualname__", type(callback).__qualname__)
    if isinstance(callback, type):
        try:
            inspect.signature(callback).bind()
        except TypeError as error:
            raise UserError(f"callbacks: {name} cannot be created without arguments ({error}): pass an instance, "
                            f"{name}(...)") from None
        callback = callback() if create else callback
    named = [attribute for attribute in dir(callback) if attribute.startswith("on_")]
    if unknown := [each for each in named if each not in HOOKS and callable(getattr(callback, each))]:
        close = get_close_matches(unknown[0], HOOKS, 1)
        known = f"did you mean {close[0]}?" if close else f"the methods are {', '.join(HOOKS)}"
        raise UserError(f"callbacks: {name} has a method {unknown[0]}, which nothing calls: {known}")
    hooks = {hook: getattr(callback, hook) for hook in HOOKS if _overrides(callback, hook)}
    if not hooks:
        raise UserError(f"callbacks: {name} has none of the methods {', '.join(HOOKS)}: subclass qfleet.Callback, or "
                        "pass a function of a record as a sink")
    for hook, method in hooks.items():
        takes_self = isinstance(callback, type) and inspect.isfunction(inspect.getattr_static(callback, hook))
        _require_signature(name, hook, method, HOOKS[hook] + takes_self)
    return CheckedCallback(name, hooks)


def _overrides(callback: Any, hook: str) -> bool:
    method = getattr(callback, hook, None)
    return method is not None and getattr(method, "__func__", method) is not getattr(Callback, hook)


def _require_signature(name: str, hook: str, method: Any, arguments: int) -> None:
    try:
        inspect.signature(method).bind(*range(arguments))
    except TypeError as error:
        wanted = ", ".join(list(inspect.signature(getattr(Callback, hook)).parameters)[1:])
        raise UserError(f"callbacks: {name}.{hook} must accept ({wanted}): {error}") from None
    except ValueError:  # some builtins have no signature
        return


Event = Episode | Evaluation | SavedCheckpoint
EVENT_ORDER: dict[type, str] = {Episode: "on_episode", Evaluation: "on_evaluation", SavedCheckpoint: "on_checkpoint"}


class EventQueue:
    """Events of a run since the last round; kept only for callbacks that take them."""

    def __init__(self, callbacks: Sequence[CheckedCallback]) -> None:
        self._kinds = {kind for kind, hook in EVENT_ORDER.items() if any(hook in each.hooks for each in callbacks)}
        self._events: list[Event] = []

    def add(self, event: Event) -> None:
        if type(event) in self._kinds:
            self._events.append(event)

    def take(self) -> list[Event]:
        """Return all events in the order of `Callback`, and forget them."""
        events, self._events = self._events, []
        order = list(EVENT_ORDER)
        return sorted(events, key=lambda event: order.index(type(event)))


class CallbackWorker:
    """Worker of the loop that calls the callbacks. After one has failed, none is called, and the run is stopped.

    The run then ends as usual, with a checkpoint, and `raise_failure` raises the error.
    """

    def __init__(self, callbacks: Sequence[CheckedCallback], events: EventQueue, control: RunControl,
                 checkpoints: CheckpointWriter) -> None:
        self.callbacks, self.events, self.control, self.checkpoints = callbacks, events, control, checkpoints
        self._last_saved: Progress | None = None
        self._failure: CallbackError | None = None
        self._cause: BaseException | None = None

    def start(self) -> None:
        self._last_saved = self.checkpoints.saved_at
        self._call("on_start")

    def step(self) -> bool:
        """Pass on the events of the round; never busy, so always False."""
        if self.callbacks:
            self.pass_events()
            self._call("on_step")
        return False

    def pass_events(self) -> None:
        self._add_checkpoint()
        for event in self.events.take():
            self._call(EVENT_ORDER[type(event)], event)

    def end(self, reason: str) -> None:
        """Pass on the last events and the end of the run."""
        self.pass_events()
        self._call("on_end", reason)

    @property
    def failed(self) -> bool:
        """True after an exception in a callback."""
        return self._failure is not None

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure from self._cause

    def _add_checkpoint(self) -> None:
        saved = self.checkpoints.saved_at
        if saved is not None and saved != self._last_saved:
            self._last_saved = saved
            self.events.add(SavedCheckpoint(*saved, self.checkpoints.saved_path))

    def _call(self, hook: str, *arguments: object) -> None:
        for callback in self.callbacks:
            method = callback.hooks.get(hook)
            if method is None or self._failure is not None:
                continue
            try:
                method(self.control, *arguments)
            except (Exception, SystemExit) as error:  # sys.exit() too: the run is to be saved
                self._failure = CallbackError(f"{raised_text(f'callback {callback.name}.{hook}', error)}; the run was "
                                              f"stopped at step {self.control.steps:,}")
                self._cause = error
                self.control.stop()
