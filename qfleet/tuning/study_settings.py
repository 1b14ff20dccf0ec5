"""Settings of a study: number of trials, sampler, pruner and objective, and the objects of Optuna that they name."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from statistics import fmean
from typing import Any, Literal

from pydantic import Field

from qfleet.config import Config, Count, PositiveCount
from qfleet.core.errors import UserError

Sampler = Literal["tpe", "random", "grid", "cmaes"]
Pruner = Literal["median", "hyperband", "halving", "percentile", "none"]
Objective = Literal["final", "last", "best", "mean"]

FINAL_EVALUATIONS = 3
OBJECTIVES = {"final": f"mean of the last {FINAL_EVALUATIONS} evaluations", "last": "last evaluation",
              "best": "best evaluation", "mean": "mean of all evaluations"}
STARTUP_TRIALS = 5
"""Trials with random settings, none of which is pruned by comparison with others."""

WARMUP = 1 / 3
"""Part of a trial's evaluations before which `median` and `percentile` prune nothing."""

PERCENTILE = 25.0


class StudySettings(Config):
    """Settings of a study, stored in its directory."""

    trials: PositiveCount = Field(20, description="trials of the whole study, failed and pruned ones included")
    sampler: Sampler = Field("tpe", description="how settings are chosen")
    pruner: Pruner = Field("median", description="which trials are stopped early, from the scores of their evaluations")
    objective: Objective = Field("final", description="score of a trial, from the evaluations of its run")
    seeds_per_trial: PositiveCount = Field(
        1, description="runs of a trial, with seed, seed+1, ...; the scores are averaged")
    seed: Count = Field(1, description="seed of the sampler and of the first run of each trial")

    def score(self, evaluations: Sequence[float]) -> float:
        """Score of a run from its evaluations, of which there is at least one."""
        if self.objective == "best":
            return max(evaluations)
        count = {"final": FINAL_EVALUATIONS, "last": 1, "mean": len(evaluations)}[self.objective]
        return fmean(evaluations[-count:])


def require_optuna() -> None:
    """UserError if the packages of the extra are not installed."""
    missing = [name for name in ("optuna", "matplotlib") if find_spec(name) is None]
    if missing:
        raise UserError(f"tuning needs {' and '.join(missing)}: pip install 'qfleet[tune]'")


@contextmanager
def quiet_optuna() -> Iterator[None]:
    """Inside, Optuna reports warnings only: the progress of a study has a view of its own."""
    from optuna import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.WARNING)
    try:
        yield
    finally:
        logging.set_verbosity(before)


def make_sampler(settings: StudySettings, jobs: int, done: int) -> Any:
    """Sampler of Optuna by name. `done` trials exist already: a continued study must not repeat its random numbers."""
    from optuna import samplers
    from optuna.exceptions import ExperimentalWarning

    seed = settings.seed + done
    if settings.sampler == "cmaes":
        if find_spec("cmaes") is None:
            raise UserError("sampler=cmaes needs the package cmaes: pip install cmaes, or use sampler=tpe")
        return samplers.CmaEsSampler(seed=seed)
    if settings.sampler == "tpe":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            return samplers.TPESampler(seed=seed, n_startup_trials=STARTUP_TRIALS, multivariate=True, group=True,
                                       constant_liar=jobs > 1)
    return samplers.RandomSampler(seed=seed)  # the points of a grid are enqueued


def make_pruner(settings: StudySettings, evaluations: int) -> Any:
    """Pruner of Optuna by name. Its steps count evaluations, of which a whole trial has this many."""
    from optuna import pruners

    warmup = int(evaluations * WARMUP) + 1
    if settings.pruner == "median":
        return pruners.MedianPruner(n_startup_trials=STARTUP_TRIALS, n_warmup_steps=warmup)
    if settings.pruner == "percentile":
        return pruners.PercentilePruner(PERCENTILE, n_startup_trials=STARTUP_TRIALS, n_warmup_steps=warmup)
    if settings.pruner == "halving":
        return pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3)
    if settings.pruner == "hyperband":
        return pruners.HyperbandPruner(min_resource=1, max_resource=max(2, evaluations), reduction_factor=3)
    return pruners.NopPruner()
