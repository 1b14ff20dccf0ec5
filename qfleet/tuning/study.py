"""`qfleet.tune`: a hyperparameter search whose trials are runs in processes of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from qfleet.config import validate
from qfleet.config.layers import leaves
from qfleet.core.errors import UserError
from qfleet.launch.arguments import Settings, resolve_arguments
from qfleet.process.signals import EXIT_CODES, SignalledStop, stop_on_signal
from qfleet.runconfig.resolution import Resolved
from qfleet.runconfig.run_config import RunConfig
from qfleet.runs.directory import default_name
from qfleet.runs.find import StrPath, texts_of
from qfleet.tuning.results import best_of, write_best, write_plots, write_trials
from qfleet.tuning.space import SearchSpace, TrialConfig, make_space
from qfleet.tuning.study_folder import StudyFile, StudyFolder, recipe_of
from qfleet.tuning.study_settings import StudySettings, make_sampler, quiet_optuna, require_optuna
from qfleet.tuning.trials import TrialRunner, TrialSummary, requeue_interrupted, summaries
from qfleet.tuning.view import SilentStudyView, StudyView

EVALUATIONS = 10
"""Evaluations of a trial's run, unless eval.period_steps or eval.period_updates is given."""

ENDED = ("complete", "pruned", "failed")

SpaceLike = Mapping[str, Any] | StrPath | Callable[[Any], Mapping[str, Any]]
"""Search space: a mapping of config keys, the path of a YAML file, or a function of an Optuna trial."""


@dataclass(frozen=True)
class TuneResult:
    """Result of a study.

    Attributes:
        directory: Directory of the study.
        trials: All trials that were started.
        best: The complete trial with the highest score; None if no trial is complete.
        best_recipe: YAML file with the best settings, for `qfleet.train`; None if no trial is complete.
        plots: Images of the scores.
        reason: `trials` if the study has all its trials, else `interrupted` or `preempted`.
        exit_code: Exit code of the command line.
    """

    directory: Path
    trials: tuple[TrialSummary, ...]
    best: TrialSummary | None
    best_recipe: Path | None
    plots: tuple[Path, ...]
    reason: str
    exit_code: int


def tune(config: RunConfig | Mapping[str, Any] | StrPath | Any = None, overrides: Sequence[str] = (), *,
         space: SpaceLike | None = None, trials: int | None = None, jobs: int = 1, sampler: str = "tpe",
         pruner: str = "median", objective: str = "final", seeds_per_trial: int = 1, study: StrPath | None = None,
         resume: bool = False, env: Any = None, wrappers: Sequence[Any] | None = None, progress: bool = False,
         **settings: Unpack[Settings]) -> TuneResult:
    """Search for good settings: train trials with settings from a search space, and keep the best.

    Every trial is a run in a process of its own, in the directory of the study. A trial that fails is recorded, and
    the study goes on. Ctrl-C leaves a study that `resume=True` continues.

    Args:
        config: A recipe, file, environment or settings, as for `qfleet.train`, which all trials share.
        overrides: Texts of the form `key=value` for all trials.
        space: What to vary: a mapping of config keys to ranges or choices, such as
            `{"learner.learning_rate": {"low": 1e-5, "high": 1e-2, "log": True}, "agent.n_step": "1..5",
            "learner.batch_size": [32, 64, 128]}`, the path of a YAML file with one, or a function that takes an Optuna
            trial and returns settings by config key.
        trials: Number of trials of the whole study (20 if None).
        jobs: Trials at a time.
        sampler: How settings are chosen: `tpe`, `random`, `grid` or `cmaes`.
        pruner: Which trials are stopped early: `median`, `hyperband`, `halving`, `percentile` or `none`.
        objective: Score of a run: the mean of its last three evaluations (`final`), its `last` or `best` evaluation, or
            the `mean` of all.
        seeds_per_trial: Runs of a trial, with different seeds, whose scores are averaged.
        study: Directory of the study; None = a new one in `studies`.
        resume: Continue the study in this directory. Its settings are those that it was started with.
        env: The environment, as for `qfleet.train`.
        wrappers: Its wrappers, as for `qfleet.train`.
        progress: Print the progress to stderr.
        **settings: Config keys for all trials, as for `qfleet.train`. `total_steps` is the length of a trial.

    Returns:
        The trials, the best of them, and the path of the best settings as a recipe.

    Raises:
        UserError: The search space or a setting is not valid, the study exists, or Optuna is not installed.

    Example:
        >>> result = qfleet.tune("cartpole", space={"learner.learning_rate": "1e-4..1e-2:log"}, trials=20, jobs=4)
        >>> qfleet.train(result.best_recipe)
    """
    require_optuna()
    _require_counts(trials=trials, jobs=jobs, seeds_per_trial=seeds_per_trial)
    if resume:
        if study is None or config is not None or overrides or settings or env is not None:
            raise UserError("resume=True continues the study in study=DIR with its own settings: pass no config, and "
                            "of the other arguments only trials, jobs, progress and a function as space")
        with quiet_optuna():
            return _continued(Path(study).expanduser(), space, trials, jobs, progress)
    resolved = _shared_config(resolve_arguments(config, overrides, env, wrappers, settings), config, overrides, env,
                              wrappers, settings)
    given = {"trials": trials or 20, "sampler": sampler, "pruner": pruner, "objective": objective,
             "seeds_per_trial": seeds_per_trial, "seed": resolved.config.seed}
    own = validate(StudySettings, given, "tune")
    shared = TrialConfig(recipe_of(resolved))
    if space is None:
        raise UserError("tune needs a search space: space=..., such as {\"learner.learning_rate\": \"1e-5..1e-2:log\"}")
    cfg = resolved.config
    path = Path(study) if study is not None else Path("studies") / default_name(cfg.env.id, cfg.agent.algo, cfg.seed)
    with quiet_optuna():
        searched = make_space(space, shared)
        _require_sampler(searched, own)
        file = StudyFile(settings=own, space=searched.to_data(), source=_name_of(config, cfg),
                         evaluations=_evaluations(cfg))
        folder = StudyFolder.create(path.expanduser(), file, resolved)
        return _work(folder, file, searched, shared, jobs, progress)


def _continued(path: Path, space: SpaceLike | None, trials: int | None, jobs: int, progress: bool) -> TuneResult:
    folder = StudyFolder.open(path)
    file, shared = folder.file(), TrialConfig(folder.base())
    if file.space is None and not callable(space):
        raise UserError(f"the search space of {path} is a function of a program: continue it there, with "
                        "qfleet.tune(study=..., resume=True, space=FUNCTION)")
    if file.space is not None and space is not None:
        raise UserError(f"the study {path} has its search space already: leave out space")
    if trials is not None:
        folder.set_trials(trials)
        file = folder.file()
    return _work(folder, file, make_space(space if file.space is None else file.space, shared), shared, jobs, progress)


def _work(folder: StudyFolder, file: StudyFile, space: SearchSpace, config: TrialConfig, jobs: int,
          progress: bool) -> TuneResult:
    folder.lock()
    try:
        study = folder.optuna_study(file.settings, jobs, file.evaluations)
        continued = requeue_interrupted(study)
        before = summaries(study)
        known, done = best_of(before), sum(trial.state in ENDED for trial in before)
        view: StudyView | SilentStudyView = SilentStudyView()
        if progress:
            view = StudyView(file.settings.trials, done, None if known is None else known.score)
        stop = SignalledStop()
        try:
            view.say(f"study      {folder.path}, {_plan_text(file, config)}")
            if continued:
                view.say(f"{continued} interrupted trial{'s continue' if continued > 1 else ' continues'}")
            with stop_on_signal(stop):
                TrialRunner(folder, study, space, config, file.settings, file.evaluations, view).run(jobs, stop)
        finally:
            view.close()
            trials = summaries(study)
            write_trials(folder.path / "trials.csv", trials)
            write_best(folder, file, config, trials)
        plots = write_plots(folder, trials, space)
    finally:
        folder.unlock()
    best = best_of(trials)
    code = EXIT_CODES[stop.reason] if stop.reason is not None else 0 if best is not None else 1
    return TuneResult(folder.path, tuple(trials), best, None if best is None else folder.best, tuple(plots),
                      stop.reason or "trials", code)


def _plan_text(file: StudyFile, config: TrialConfig) -> str:
    cfg, settings = config.base, file.settings
    length = f"{cfg.total_steps:,} steps" if cfg.total_updates is None else f"{cfg.total_updates:,} updates"
    seeds = f" on {settings.seeds_per_trial} seeds" if settings.seeds_per_trial > 1 else ""
    return (f"{cfg.env.id}: {settings.trials} trials of {length}{seeds}, {file.evaluations} evaluations each, "
            f"sampler {settings.sampler}, pruner {settings.pruner}, score: {settings.objective}")


def _shared_config(resolved: Resolved, config: Any, overrides: Sequence[str], env: Any, wrappers: Any,
                   settings: Mapping[str, Any]) -> Resolved:
    """Config of all trials: without stop_at, and with ten evaluations, unless these keys are given."""
    cfg = resolved.config
    given = {pair.partition("=")[0] for pair in overrides} | {key for key, _ in leaves(settings)}
    if place := sorted(given & {"run.name", "run.root"}):
        raise UserError(f"{place[0]}: the runs of a study are in its directory, which --study chooses (study=...)")
    if foreign := [text for text in texts_of(cfg.model_dump(mode="json")) if text.startswith(("__main__:", "object:"))]:
        raise UserError(f"{foreign[0].partition(':')[2]}: trials are processes of their own, which cannot import "
                        "definitions of a script or notebook, lambdas and instances: put a class or a function into a "
                        "file, my_module.py, and pass it from there")
    more: dict[str, Any] = {} if "stop_at" in given else {"stop_at": None}
    if not given & {"eval.period_steps", "eval.period_updates"}:
        unit, total = ("steps", cfg.total_steps) if cfg.total_updates is None else ("updates", cfg.total_updates)
        more[f"eval.period_{unit}"] = max(1, total // EVALUATIONS)
    shared = TrialConfig(recipe_of(resolved)).resolve(more, "tune")
    sources = {key: shared.provenance[key] if key in more else source for key, source in resolved.provenance.items()}
    return Resolved(shared.config, sources)


def _evaluations(cfg: RunConfig) -> int:
    """Number of evaluations of a whole run."""
    if cfg.eval.period_updates is not None and cfg.total_updates is not None:
        return max(1, cfg.total_updates // cfg.eval.period_updates)
    return max(1, cfg.total_steps // cfg.eval.period_steps) if cfg.eval.period_steps else 1


def _name_of(config: Any, cfg: RunConfig) -> str:
    return str(config) if isinstance(config, str | Path) else f"{cfg.agent.algo} on {cfg.env.id}"


def _require_sampler(space: SearchSpace, settings: StudySettings) -> None:
    """UserError if the package of a sampler is missing, or the space has no grid."""
    make_sampler(settings, 1, 0)
    if settings.sampler == "grid":
        space.grid()


def _require_counts(**counts: int | None) -> None:
    for name, value in counts.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise UserError(f"{name}={value!r}: must be an integer of at least 1")
