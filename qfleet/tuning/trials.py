"""Trials of a study: asks Optuna for settings, trains each trial in processes of its own, and reports the scores."""

from __future__ import annotations

import random
import sys
import time
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Protocol

from qfleet.config import DEFAULT
from qfleet.core.errors import UserError
from qfleet.launch.run_process import RunOrder, RunPool, RunProcess, remove_saved_state, with_place
from qfleet.launch.train_result import TrainResult
from qfleet.process.signals import SignalledStop
from qfleet.runs.directory import RunDirectory
from qfleet.tuning.space import SearchSpace, TrialConfig
from qfleet.tuning.study_folder import StudyFolder
from qfleet.tuning.study_settings import StudySettings

POLL_S = 0.1
STOPPED = ("interrupted", "preempted")


class StudyEvents(Protocol):
    """What a study tells its view."""

    def started(self, trial: ActiveTrial) -> None: ...
    def evaluated(self, trial: ActiveTrial, score: float) -> None: ...
    def ended(self, trial: ActiveTrial, state: str, text: str) -> None: ...


@dataclass
class ActiveTrial:
    """A trial in progress: the orders of its seeds, and the process of the current one."""

    trial: Any
    settings: dict[str, Any]
    orders: list[RunOrder]
    process: RunProcess | None = None
    pruned: bool = False
    seen: int = 0
    """Reported evaluations of the current run."""
    reported: int = 0
    """Reported evaluations of all runs."""
    scores: list[float] = field(default_factory=list)
    """Scores of the finished runs."""
    runs: list[RunDirectory] = field(default_factory=list)
    steps: int = 0
    seconds: float = 0.0

    @property
    def number(self) -> int:
        return int(self.trial.number)

    def start_run(self, pool: RunPool) -> None:
        """Start the run of the next seed."""
        self.seen, self.pruned = 0, False
        self.process = pool.start(self.orders.pop(0))
        self.runs.append(self.process.directory)

    def report(self, score: float) -> None:
        """Report an evaluation of the current run to Optuna."""
        self.seen += 1
        self.reported += 1
        self.trial.report(score, self.reported)

    def prune(self) -> None:
        """Stop the current run for the pruner."""
        assert self.process is not None
        self.pruned = True
        self.process.request_stop()

    def count(self, result: TrainResult) -> None:
        """Add the steps and seconds of a run that has ended."""
        self.steps += result.steps
        self.seconds += result.seconds


class TrialRunner:
    """Works on a study until it has its number of trials or is stopped."""

    def __init__(self, folder: StudyFolder, study: Any, space: SearchSpace, config: TrialConfig,
                 settings: StudySettings, evaluations: int, view: StudyEvents, trust: bool = False) -> None:
        self.folder, self.study, self.space, self.config, self.settings = folder, study, space, config, settings
        self.expected = evaluations * settings.seeds_per_trial
        self.view, self.trust = view, trust
        self.active: list[ActiveTrial] = []
        self._grid = self._shuffled_grid() if settings.sampler == "grid" else None

    def run(self, jobs: int, stop: SignalledStop) -> None:
        with RunPool(self.folder.logs, jobs) as pool:
            while self.active or (stop.reason is None and self._left() > 0):
                if stop.reason is not None:
                    pool.request_stop()
                elif len(self.active) < jobs and self._left() > 0:
                    self._start(pool)
                    continue
                for process in pool.exited():
                    self._end_run(self._trial_of(process), pool, stop)
                for trial in self.active:
                    self._report(trial)
                time.sleep(POLL_S)

    def _left(self) -> int:
        """Trials that are still to be started."""
        trials = self.study.get_trials(deepcopy=False)
        most = self.settings.trials if self._grid is None else min(self.settings.trials, len(self._grid))
        return most - sum(not (is_interrupted(trial) or trial.state.name == "WAITING") for trial in trials)

    def _start(self, pool: RunPool) -> None:
        self._enqueue_grid_point()
        trial = self.study.ask()
        run = trial.user_attrs.get("run", f"trial-{trial.number:03}")
        trial.set_user_attr("run", run)
        settings: dict[str, Any] = {}
        try:
            settings = self.space.suggest(trial)
            trial.set_user_attr("settings", settings)
            orders = self._orders(settings, run, trial.number)
        except UserError as error:
            self._fail(ActiveTrial(trial, settings, []), str(error))
            return
        except Exception as error:  # raised by a search space of the user
            self._fail(ActiveTrial(trial, settings, []), f"{type(error).__name__}: {error}")
            return
        active = ActiveTrial(trial, settings, orders)
        self.active.append(active)
        active.start_run(pool)
        self.view.started(active)

    def _orders(self, settings: dict[str, Any], run: str, number: int) -> list[RunOrder]:
        resolved = self.config.resolve(settings, f"trial {number}")
        first, count = resolved.config.seed, self.settings.seeds_per_trial
        names = [run] if count == 1 else [f"{run}-s{first + index}" for index in range(count)]
        config = resolved.config
        if resolved.provenance.get("eval.final_episodes", DEFAULT) == DEFAULT:  # a study compares evaluations
            config = config.model_copy(update={"eval": config.eval.model_copy(update={"final_episodes": 0})})
        configs = [with_place(config.model_copy(update={"seed": first + index}), self.folder.path, name)
                   for index, name in enumerate(names)]
        return [RunOrder(config, resolved.provenance, sys.argv, may_exist=True, trust=self.trust)
                for config in configs]

    def _enqueue_grid_point(self) -> None:
        trials = self.study.get_trials(deepcopy=False)
        if self._grid is None or any(trial.state.name == "WAITING" for trial in trials):
            return
        used = max((trial.user_attrs.get("grid", -1) for trial in trials), default=-1)
        self.study.enqueue_trial(self._grid[used + 1], user_attrs={"grid": used + 1})

    def _shuffled_grid(self) -> list[dict[str, Any]]:
        """All points in a random order, so that a study which ends early covers the space."""
        points = self.space.grid()
        random.Random(self.settings.seed).shuffle(points)
        return points

    def _trial_of(self, process: RunProcess) -> ActiveTrial:
        return next(trial for trial in self.active if trial.process is process)

    def _report(self, active: ActiveTrial) -> None:
        """Report new evaluations, and stop the run if the pruner says so."""
        process = active.process
        if process is None or not any("eval/mean_reward" in record for record in process.new_records()):
            return
        self._report_scores(active, process.scores())

    def _report_scores(self, active: ActiveTrial, scores: list[float]) -> None:
        for score in scores[active.seen:]:
            active.report(score)
            self.view.evaluated(active, score)
            if active.reported < self.expected and not active.pruned and active.trial.should_prune():
                active.prune()

    def _end_run(self, active: ActiveTrial, pool: RunPool, stop: SignalledStop) -> None:
        process = active.process
        assert process is not None
        result, error = process.end()
        scores = process.scores()
        stopped = result is None or result.reason in STOPPED
        if result is not None:
            active.count(result)
        if active.pruned and stopped:
            process.directory.conclude("pruned")
            self._tell_pruned(active)
        elif stopped and stop.reason is not None:
            self._tell(active, "FAIL", "interrupted")
        elif result is None or stopped:
            self._fail(active, error or "the run was stopped by a signal")
        elif not scores:
            self._fail(active, "the run ended without an evaluation: check eval.from_return")
        else:
            self._report_scores(active, scores)
            active.scores.append(self.settings.score(scores))
            if not active.orders:
                self._tell(active, "COMPLETE", "", fmean(active.scores))
            elif active.pruned:
                self._tell_pruned(active)
            elif stop.reason is not None:
                self._tell(active, "FAIL", "interrupted")
            else:
                active.start_run(pool)

    def _tell_pruned(self, active: ActiveTrial) -> None:
        self._tell(active, "PRUNED", f"after evaluation {active.reported} of {self.expected}")

    def _fail(self, active: ActiveTrial, error: str) -> None:
        active.trial.set_user_attr("error", error)
        self._tell(active, "FAIL", error)

    def _tell(self, active: ActiveTrial, state: str, text: str, score: float | None = None) -> None:
        from optuna.trial import TrialState

        active.trial.set_user_attr("steps", active.steps)
        active.trial.set_user_attr("seconds", round(active.seconds, 3))
        self.study.tell(active.trial, score, state=TrialState[state])
        self.active = [other for other in self.active if other is not active]
        if state in ("COMPLETE", "PRUNED"):
            for run in active.runs:
                remove_saved_state(run)
        self.view.ended(active, state, text)


def is_interrupted(trial: Any) -> bool:
    """True for a trial that was stopped with its study; one that failed by itself has an error."""
    return trial.state.name == "FAIL" and "error" not in trial.user_attrs


def requeue_interrupted(study: Any) -> int:
    """Let trials that were interrupted, or whose study died, continue as new trials. Returns their number."""
    from optuna.trial import TrialState

    for trial in study.get_trials(states=(TrialState.RUNNING,)):
        study.tell(trial.number, state=TrialState.FAIL)
    trials = study.get_trials()
    continued = {trial.user_attrs.get("continues") for trial in trials}
    left = [trial for trial in trials if is_interrupted(trial) and trial.number not in continued]
    for trial in left:
        attributes = {name: trial.user_attrs[name] for name in ("grid",) if name in trial.user_attrs}
        run = trial.user_attrs.get("run", f"trial-{trial.number:03}")
        study.enqueue_trial(trial.params, user_attrs=attributes | {"continues": trial.number, "run": run})
    return len(left)


@dataclass(frozen=True)
class TrialSummary:
    """A trial of a study.

    Attributes:
        number: Number of the trial, from 0.
        state: `complete`, `pruned`, `failed`, `interrupted` or `running`.
        score: Score of a complete trial; last evaluation of a pruned one; else None.
        settings: Values of the search space by config key.
        run: Name of the run directory in the study; with several seeds, its beginning.
        steps: Environment steps that were trained, of all seeds.
        seconds: Duration of the training, of all seeds.
        evaluations: Mean return of every evaluation, in order.
        error: What went wrong in a failed trial.
    """

    number: int
    state: str
    score: float | None
    settings: dict[str, Any]
    run: str
    steps: int
    seconds: float
    evaluations: tuple[float, ...]
    error: str


def summaries(study: Any) -> list[TrialSummary]:
    """All trials that were started, by number. One that continues an interrupted trial replaces it."""
    trials = [trial for trial in study.get_trials() if trial.state.name != "WAITING"]
    continued = {trial.user_attrs.get("continues") for trial in trials}
    return [_summary(trial) for trial in trials if trial.number not in continued]


def _summary(trial: Any) -> TrialSummary:
    attributes = trial.user_attrs
    state = "interrupted" if is_interrupted(trial) else {"FAIL": "failed"}.get(trial.state.name,
                                                                              trial.state.name.lower())
    evaluations = tuple(value for _, value in sorted(trial.intermediate_values.items()))
    score = trial.value if state == "complete" else evaluations[-1] if evaluations and state == "pruned" else None
    return TrialSummary(trial.number, state, score, attributes.get("settings", {}), attributes.get("run", ""),
                       attributes.get("steps", 0), attributes.get("seconds", 0.0), evaluations,
                       attributes.get("error", ""))
