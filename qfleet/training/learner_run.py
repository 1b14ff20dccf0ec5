"""One learner's run: the main loop around learner, actors, evaluator and checkpoints.

Where the actors run is decided by the `RunSetup`: in this process (`ActingSetup`) or elsewhere (`RemoteActorsSetup`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from qfleet.core.agent import Agent
from qfleet.core.env import EnvSpec
from qfleet.core.weights import WeightStore
from qfleet.replay.store import ReplayStore
from qfleet.training.callbacks import CallbackWorker, RunControl
from qfleet.training.checkpointer import CheckpointWriter, ScheduledSaving, Snapshot
from qfleet.training.evaluation import EvaluatorSlot
from qfleet.training.learner_core import Components, Hooks, LearnerCore
from qfleet.training.loop import TrainingPlan, Worker, drive
from qfleet.training.timers import TimeShares


class Acting(Protocol):
    """The actors of a learner's run, or their messages.

    `evaluates`: the evaluator runs in this process, so that its time counts.
    """

    evaluates: bool

    def begin(self) -> None:
        """Start acting."""

    def turns(self, learner: Worker) -> list[Worker]:
        """Workers of one round of the loop, with the learner wherever it is due."""

    def serve(self, sleep_s: float) -> None:
        """Called after each round; sleeps if no worker was busy."""

    def finish(self, all_updates: bool) -> None:
        """The last round is over: take no further experience; make the updates that are still due if `all_updates`."""

    def end(self) -> None:
        """The run has ended and is saved."""

    def before_checkpoint(self, index: int) -> None:
        """Called before a scheduled checkpoint with its number."""

    def before_write(self) -> None:
        """Called before a checkpoint is written."""

    def metrics(self) -> Mapping[str, float]:
        """Gauge for every record."""

    def state_dict(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> bool:
        """Load the state, after replay and learner; False if it is that of other actors, which start anew."""

    def finish_restore(self, state: Mapping[str, Any]) -> bool:
        """Last step of a restore; True if the run continues exactly."""


class RunSetup(Protocol):
    """What a learner's run is made of, apart from the learner: agent, environment spec, actors and evaluator."""

    @property
    def agent(self) -> Agent: ...
    @property
    def spec(self) -> EnvSpec: ...
    @property
    def weights(self) -> WeightStore: ...

    def components(self, plan: TrainingPlan, components: Components) -> Components:
        """Adapt the components to where the actors run."""

    def batches_ahead(self, plan: TrainingPlan, replay: ReplayStore[Any]) -> int | None:
        """Batches that the learner has before the steps or the replay change in any other way; None = unknown."""

    def acting(self, core: LearnerCore, shares: TimeShares) -> Acting: ...
    def evaluator(self, core: LearnerCore, acting: Acting) -> EvaluatorSlot: ...


MakeEvaluator = Callable[[EvaluatorSlot, LearnerCore], EvaluatorSlot]
"""Returns the evaluator of a run, given the one of its setup."""


class LearnerRun:
    """Builds actors, learner and evaluator, runs them, and saves and restores their state.

    `workers` are further workers of the loop, which are stepped after actors and learner.
    """

    workers: Sequence[Worker] = ()

    def __init__(self, setup: RunSetup, plan: TrainingPlan, hooks: Hooks, components: Components | None = None,
                 make_evaluator: MakeEvaluator = lambda evaluator, core: evaluator) -> None:
        self.plan, self.setup = plan, setup
        components = setup.components(plan, components or Components.single(plan))
        self.core = LearnerCore(setup.agent, setup.spec, plan, hooks, setup.weights, components)
        self.shares = TimeShares()
        self.core.meter.add_gauge(self.core.replay.metrics)
        self.core.meter.add_gauge(self.shares)
        self.acting = setup.acting(self.core, self.shares)
        self.core.meter.add_gauge(self.acting.metrics)
        self.evaluator = make_evaluator(setup.evaluator(self.core, self.acting), self.core)
        self.checkpoints = CheckpointWriter(plan.checkpoint, self.core.progress, self.core.meter)
        self.callbacks = CallbackWorker(hooks.callbacks, self.core.events, self.control(), self.checkpoints)
        self._round: Sequence[Worker] = ()

    def control(self) -> RunControl:
        """What callbacks can read and request of this run."""
        return RunControl(self.core, self.evaluator.request, self.checkpoints.request)

    def run(self) -> str:
        """Train to the end, evaluate and save; returns the stop reason."""
        self.begin()
        self.advance(lambda: False)
        return self.finish()

    def begin(self) -> None:
        """Start acting. `advance` and `finish` must follow."""
        self.acting.begin()
        self.callbacks.start()
        core, timed = self.core, self.shares.timed
        turns = self.acting.turns(timed("time/learner_share", core.learner))
        evaluator = timed("time/eval_share", self.evaluator) if self.acting.evaluates else self.evaluator
        saving = timed("time/save_share", ScheduledSaving(self.checkpoints, self))
        self._round = [*turns, *self.workers, core.meter, evaluator, saving, self.callbacks]

    def advance(self, pause: Callable[[], bool]) -> None:
        """Run whole rounds of the loop until the run ends, or until `pause()` is true after a round."""
        stop, paused = self.core.stop, False

        def serve(sleep_s: float) -> None:
            nonlocal paused
            self.acting.serve(sleep_s)
            paused = pause()

        with self._clocks():
            try:
                drive(self._round, lambda: paused or stop(), serve)
            except BaseException:
                self.core.meter.finish()
                raise

    def finish(self) -> str:
        """Evaluate and save after the last round; returns the stop reason."""
        with self._clocks():
            return self._finish()

    def stop_clocks(self) -> None:
        """Count no time until the next round: the caller does something else."""
        self.core.meter.stop_clock()
        self.shares.stop_clock()

    @contextmanager
    def _clocks(self) -> Iterator[None]:
        self.core.meter.start_clock()
        self.shares.start_clock()
        try:
            yield
        finally:
            self.stop_clocks()

    def _finish(self) -> str:
        core, stop = self.core, self.core.stop
        try:
            at_end = stop.reason in ("total_steps", "total_updates")
            self.acting.finish(at_end)
            if at_end:
                core.learner.publish()
                self.evaluator.evaluate()
            # With exact_resume, the run resumes from the last scheduled checkpoint: only that is an episode boundary.
            resumes_exactly = self.plan.exact_resume and stop.is_early and self.checkpoints.is_scheduled
            if not resumes_exactly or self.checkpoints.requested:
                self.checkpoints.save(self)
            reason = stop.reason or "total_steps"
            self.callbacks.end(reason)
        finally:
            core.meter.finish()
        self.acting.end()
        self.callbacks.raise_failure()
        core.meter.raise_failure()
        return reason

    @property
    def failed(self) -> bool:
        """True after an exception in a callback or a sink, which `finish` raises after the last checkpoint."""
        return self.callbacks.failed or self.core.meter.failed

    def before_checkpoint(self, index: int) -> None:
        self.acting.before_checkpoint(index)

    def write(self, snapshot: Snapshot) -> Path | None:
        self.acting.before_write()
        return self.core.hooks.save(snapshot)

    def snapshot(self) -> Snapshot:
        evaluator = self.evaluator.state_dict()
        return self.core.snapshot(self.acting.state_dict() | ({"evaluator": evaluator} if evaluator else {}))

    def restore(self, state: Mapping[str, Any], segments: Iterable[tuple[str, Path]]) -> None:
        """Resume from a snapshot; exactly, if it was taken at a scheduled episode boundary."""
        self.core.restore(state, segments)
        if self.acting.restore(state) and "evaluator" in state:
            self.evaluator.load_state_dict(state["evaluator"])
        else:
            self.evaluator.resume()
        self.core.finish_restore(state)
        self.checkpoints.resume(was_scheduled=self.acting.finish_restore(state))
