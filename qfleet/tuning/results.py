"""Results of a study: a table of its trials, plots, and the best settings as a recipe."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qfleet import __version__
from qfleet.report.plots import COLOURS
from qfleet.report.status import format_duration, format_number
from qfleet.runs.atomic_file import atomic_file
from qfleet.tuning.space import DeclaredSpace, SearchSpace, TrialConfig
from qfleet.tuning.study_folder import StudyFile, StudyFolder
from qfleet.tuning.study_settings import OBJECTIVES
from qfleet.tuning.trials import TrialSummary

STATE_COLOURS = {"complete": COLOURS[0], "pruned": COLOURS[4]}
PANEL_COLUMNS = 4


def best_of(trials: Sequence[TrialSummary]) -> TrialSummary | None:
    """The complete trial with the highest score, the first of several; None if no trial is complete."""
    complete = [trial for trial in trials if trial.state == "complete" and trial.score is not None]
    return max(complete, key=lambda trial: trial.score or 0.0, default=None)


def ranked(trials: Sequence[TrialSummary]) -> list[TrialSummary]:
    """Complete trials by score, then the others by number."""
    complete = [trial for trial in trials if trial.state == "complete"]
    others = [trial for trial in trials if trial.state != "complete"]
    return [*sorted(complete, key=lambda trial: -(trial.score or 0.0)), *others]


def format_value(value: Any) -> str:
    """A value of the search space in few characters."""
    if isinstance(value, float):
        return f"{value:.3g}"
    return str(value) if isinstance(value, str) else json.dumps(value, default=str)


def keys_of(trials: Sequence[TrialSummary]) -> list[str]:
    return list(dict.fromkeys(key for trial in trials for key in trial.settings))


def table_rows(trials: Sequence[TrialSummary]) -> list[list[str]]:
    """Rows of the table in the terminal, with a header."""
    keys = keys_of(trials)
    first = ["trial", "state", "score", "steps", "time"]
    names = [*first, *(key.rpartition(".")[2] for key in keys)]
    header = [key if names.count(name) > 1 else name for key, name in zip(keys, names[len(first):], strict=True)]
    rows = [[*first, *header]]
    for trial in trials:
        score = "-" if trial.score is None else format_number(trial.score)
        rows.append([str(trial.number), trial.state, score, f"{trial.steps:,}", format_duration(trial.seconds),
                     *(format_value(trial.settings[key]) if key in trial.settings else "-" for key in keys)])
    return rows


def write_trials(path: Path, trials: Sequence[TrialSummary]) -> None:
    """Write all trials as CSV."""
    keys = keys_of(trials)
    with atomic_file(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["trial", "state", "score", "steps", "seconds", "evaluations", "run", "error", *keys])
        for trial in trials:
            writer.writerow([trial.number, trial.state, trial.score, trial.steps, trial.seconds,
                             len(trial.evaluations), trial.run, trial.error,
                             *(trial.settings.get(key) for key in keys)])


def write_best(folder: StudyFolder, file: StudyFile, config: TrialConfig, trials: Sequence[TrialSummary]) -> None:
    """Write the best settings as a recipe, if a trial is complete."""
    best = best_of(trials)
    if best is None or best.score is None:
        return
    settings = file.settings
    seeds = f"{settings.seeds_per_trial} seed{'s' if settings.seeds_per_trial > 1 else ''}"
    tuned = [f"  {key}: {value if isinstance(value, float) else format_value(value)}"
             for key, value in best.settings.items()]
    header = [f"Best settings of the study {folder.path.resolve().name}, from qfleet {__version__}.",
              f"Trial {best.number} of {len(trials)}: score {format_number(best.score)}, the "
              f"{OBJECTIVES[settings.objective]}, after {best.steps:,} steps with {seeds}.",
              f"Train it with `qfleet train {folder.best}`. Tuned keys:", *tuned]
    folder.write_best(config.resolve(best.settings, f"trial {best.number}"), file, "\n".join(header))


def write_plots(folder: StudyFolder, trials: Sequence[TrialSummary], space: SearchSpace) -> list[Path]:
    """Draw the scores by trial and by parameter; nothing before the first score."""
    scored = [trial for trial in trials if trial.score is not None]
    if not scored:
        return []
    logarithmic = [parameter.key for parameter in space.parameters if getattr(parameter, "log", False)] \
        if isinstance(space, DeclaredSpace) else []
    history, parameters = folder.path / "history.png", folder.path / "parameters.png"
    _draw_history(history, scored)
    _draw_parameters(parameters, scored, logarithmic)
    return [history, parameters]


def _figure(width: float, height: float) -> Any:
    import matplotlib

    matplotlib.use("agg", force=False)
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _draw_history(path: Path, trials: Sequence[TrialSummary]) -> None:
    """Score of every trial, and the best so far."""
    figure = _figure(7, 4)
    axes = figure.subplots()
    _scatter(axes, trials, [trial.number for trial in trials])
    best, line = -math.inf, []
    for trial in trials:
        best = max(best, trial.score or 0.0) if trial.state == "complete" else best
        line.append(best if math.isfinite(best) else math.nan)
    axes.step([trial.number for trial in trials], line, where="post", color=COLOURS[1], label="best so far")
    axes.set(xlabel="trial", ylabel="score", title="Scores of the trials")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend()
    axes.grid(alpha=0.3)
    with atomic_file(path) as partial:
        figure.savefig(partial, dpi=120)


def _draw_parameters(path: Path, trials: Sequence[TrialSummary], logarithmic: Sequence[str]) -> None:
    """Score against the value of each parameter, one panel each."""
    keys = keys_of(trials)
    columns = min(PANEL_COLUMNS, len(keys))
    figure = _figure(3.2 * columns, 2.8 * math.ceil(len(keys) / columns))
    panels = figure.subplots(math.ceil(len(keys) / columns), columns, squeeze=False, sharey=True).ravel()
    for axes, key in zip(panels, keys, strict=False):
        having = [trial for trial in trials if key in trial.settings]
        values = [trial.settings[key] for trial in having]
        if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
            values = [format_value(value) for value in values]
        _scatter(axes, having, values)
        axes.set(xlabel=key, xscale="log" if key in logarithmic else axes.get_xscale())
        axes.tick_params(axis="x", which="minor", labelsize=6, labelrotation=45)
        axes.grid(alpha=0.3)
    for axes in panels[len(keys):]:
        axes.set_visible(False)
    panels[0].set_ylabel("score")
    panels[0].legend()
    with atomic_file(path) as partial:
        figure.savefig(partial, dpi=120)


def _scatter(axes: Any, trials: Sequence[TrialSummary], x: Sequence[Any]) -> None:
    for state, colour in STATE_COLOURS.items():
        points = [(value, trial.score) for value, trial in zip(x, trials, strict=True) if trial.state == state]
        if points:
            axes.scatter(*zip(*points, strict=True), color=colour, label=state, s=24, zorder=3)
