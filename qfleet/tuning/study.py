"""`qfleet.tune`: a hyperparameter search whose trials are runs in processes of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from qfleet.config import DEFAULT, flatten, validate
from qfleet.config.objects import require_names
from qfleet.core.errors import UserError
from qfleet.interface.arguments import Settings, resolve_arguments
from qfleet.process.signals import EXIT_CODES, SignalledStop, stop_on_signal
from qfleet.runconfig.resolution import COMMAND_LINE, KEYWORDS, SETTINGS, Resolved
from qfleet.runconfig.run_config import RunConfig
from qfleet.runs.directory import default_name
from qfleet.runs.find import StrPath
from qfleet.runs.names import absolute_name
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
         space: SpaceLike | None = None, trials: int | None = None, jobs: int = 1,
         sampler: str | None = None, pruner: str | None = None, objective: str | None = None,
         seeds_per_trial: int | None = None, study: StrPath | None = None, resume: bool = False, env: Any = None,
         wrappers: Sequence[Any] | None = None, progress: bool = False, trust: bool = False,
         **settings: Unpack[Settings]) -> TuneResult:
    """Search for good settings: train trials with settings from a search space, and keep the best.

    Every trial is a run in its own process, in the directory of the study. If a trial fails, it is recorded, and the
    study continues. `resume=True` continues a study after Ctrl-C.

    Args:
        config: A recipe, file, environment or settings, as for `qfleet.train`, which all trials share.
        overrides: Strings of the form `key=value` for all trials.
        space: What to vary: a mapping of config keys to ranges or choices, such as
            `{"learner.learning_rate": {"low": 1e-5, "high": 1e-2, "log": True}, "agent.n_step": "1..5",
            "learner.batch_size": [32, 64, 128]}`, the path of a YAML file with one, or a function that takes an Optuna
            trial and returns settings by config key.
        trials: Number of trials of the whole study; None = 20.
        jobs: Trials at a time.
        sampler: How settings are chosen: `tpe` (None), `random`, `grid` or `cmaes`.
        pruner: Which trials are stopped early: `median` (None), `hyperband`, `halving`, `percentile` or `none`.
        objective: Score of a run: the mean of its last three evaluations (`final`, None), its `last` or `best`
            evaluation, or the `mean` of all.
        seeds_per_trial: Runs of a trial, with different seeds, whose scores are averaged; None = 1.
        study: Directory of the study; None = a new one in `studies`.
        resume: Continue the study in this directory. Its settings are those that it was started with.
        env: The environment, as for `qfleet.train`.
        wrappers: Its wrappers, as for `qfleet.train`.
        progress: Print the progress to stderr.
        trust: With `resume`, allow a study that was not created on this machine (a copy, a download) to import modules
            that it names.
        **settings: Config keys for all trials, as for `qfleet.train`. `total_steps` is the length of a trial.

    Returns:
        The trials, the best of them, and the path of the best settings as a recipe. Ctrl-C does not raise: the reason
        is then `interrupted` and `exit_code` 130.

    Raises:
        UserError: The search space or a setting is not valid, the study exists, or Optuna is not installed.

    Examples:
        >>> space = {"learner.learning_rate": "1e-4..1e-2:log", "agent.n_step": "1..5"}
        >>> result = qfleet.tune("cartpole", space=space, trials=20, jobs=4)
        >>> trained = qfleet.train(result.best_recipe)
    """
    require_optuna()
    _require_counts(trials=trials, jobs=jobs, seeds_per_trial=seeds_per_trial)
    if resume:
        if study is None or config is not None or overrides or settings or env is not None:
            raise UserError("resume=True continues the study in study=DIR with its own settings: pass no config, and "
                            "of the other arguments only trials, jobs, progress, trust and a function as space")
        with quiet_optuna():
            return _continued(Path(study).expanduser(), space, trials, jobs, progress, trust)
    resolved = _shared_config(resolve_arguments(config, overrides, env, wrappers, settings))
    given = {"trials": trials, "sampler": sampler, "pruner": pruner, "objective": objective,
             "seeds_per_trial": seeds_per_trial, "seed": resolved.config.seed}
    own = validate(StudySettings, {name: value for name, value in given.items() if value is not None}, "tune")
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
        return _work(folder, folder.file(), searched, shared, jobs, progress)


def _continued(path: Path, space: SpaceLike | None, trials: int | None, jobs: int, progress: bool,
               trust: bool) -> TuneResult:
    folder = StudyFolder.open(path)
    if not trust:
        folder.require_trusted()
    file, shared = folder.file(), TrialConfig(folder.base())
    if file.space is None and not callable(space):
        raise UserError(f"the search space of {path} is a function of a program: continue it there, with "
                        "qfleet.tune(study=..., resume=True, space=FUNCTION)")
    if file.space is not None and space is not None:
        raise UserError(f"the study {path} has its search space already: leave out space")
    if trials is not None:
        file = file.model_copy(update={"settings": file.settings.model_copy(update={"trials": trials})})
    searched = make_space(space if file.space is None else file.space, shared)
    return _work(folder, file, searched, shared, jobs, progress, trust)


def _work(folder: StudyFolder, file: StudyFile, space: SearchSpace, config: TrialConfig, jobs: int,
          progress: bool, trust: bool = False) -> TuneResult:
    folder.lock()
    try:
        folder.write(file)
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
                TrialRunner(folder, study, space, config, file.settings, file.evaluations, view,
                            trust).run(jobs, stop)
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


def _shared_config(resolved: Resolved) -> Resolved:
    """Config of all trials: without stop_at, and with ten evaluations, unless the user has set these keys.

    `init_from` becomes an absolute path: the runs of the trials have another root.
    """
    cfg = resolved.config
    sources = resolved.provenance or dict.fromkeys(flatten(cfg), SETTINGS)  # a RunConfig is complete
    if place := [key for key in ("run.name", "run.root") if sources[key] in (COMMAND_LINE, KEYWORDS)]:
        raise UserError(f"{place[0]}: the runs of a study are in its directory, which --study chooses (study=...)")
    require_names(cfg.model_dump(mode="json"), "tune")
    more: dict[str, Any] = {} if _is_given(sources["stop_at"]) else {"stop_at": None}
    if not any(_is_given(sources[key]) for key in ("eval.period_steps", "eval.period_updates")):
        unit, total = ("steps", cfg.total_steps) if cfg.total_updates is None else ("updates", cfg.total_updates)
        more[f"eval.period_{unit}"] = max(1, total // EVALUATIONS)
    if cfg.init_from is not None:
        more["init_from"] = absolute_name(cfg.init_from, cfg.run.root)
    shared = TrialConfig(recipe_of(Resolved(cfg, sources))).resolve(more, "tune")
    return Resolved(shared.config, {key: shared.provenance[key] if key in more else source
                                    for key, source in sources.items()})


def _is_given(source: str) -> bool:
    """True for the source of a value that the user has set, here or in a file."""
    return source != DEFAULT and not source.startswith("recipe ")


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
