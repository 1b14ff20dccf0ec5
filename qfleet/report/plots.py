"""Learning curves as an image: runs that differ only in seed become a mean line with a band.

`draw` creates the figure, `plot` saves it. A panel shows one or more tags; each group of runs has a colour.
"""

from __future__ import annotations

import atexit
import difflib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from qfleet.config import read_yaml
from qfleet.config.objects import readable
from qfleet.core.errors import UserError
from qfleet.core.final_score import FinalScore
from qfleet.report.status import format_number, format_score
from qfleet.runs.atomic_file import atomic_file
from qfleet.runs.directory import RunDirectory
from qfleet.runs.hparams import flat_settings
from qfleet.runs.metric_writers import read_metrics
from qfleet.runs.safe_open import no_follow_opener

AXES = {"steps": ("step", "environment steps"), "frames": ("frames", "frames"), "updates": ("updates", "updates"),
        "episodes": ("episodes", "episodes"), "time": ("time_s", "training time")}
"""Choice on the command line -> field of a record, label of the axis."""

RETURNS = ("rollout/ep_rew_mean", "eval/mean_reward")
NAMES = {"rollout/ep_rew_mean": "return while training", "eval/mean_reward": "return of greedy evaluations",
         "rollout/ep_len_mean": "episode length (steps)", "train/loss": "loss", "time/fps": "steps per second",
         "rollout/exploration_rate": "ε", "replay/samples_per_insert": "samples per insert",
         "actor/policy_lag": "policy lag (updates)", "replay/bytes": "replay (bytes)"}
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#5B5B5B", "#8C564B")
"""Palette of Okabe and Ito, distinguishable for colour-blind readers."""

IGNORED_KEYS = ("seed", "run.", "replay.max_bytes", "learner.parts")
"""Keys that do not distinguish experiments: the seed, logging, and the memory and cores that were available
(`learner.parts` is a key of 0.1)."""

SUFFIXES = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class RunCurve:
    """One run as read from its directory. `config` has all dotted keys, `settings` all but `IGNORED_KEYS`.

    `score` is that of its best policy over fresh episodes.
    """

    name: str
    env_id: str
    settings: Mapping[str, str]
    records: Sequence[Mapping[str, Any]]
    config: Mapping[str, str] = field(default_factory=dict)
    score: FinalScore | None = None

    def curve(self, x: str, tag: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the points of one tag, [P] and [P], sorted by x; empty if the run never logged it.

        An evaluation adds its own record: of two records at one step the later one counts.
        """
        field = AXES[x][0]
        points = {record.get("step"): (record[field], record[tag]) for record in self.records
                  if record.get(tag) is not None and record.get(field) is not None}
        array = np.array(sorted(points.values(), key=lambda point: point[0]), dtype=np.float64).reshape(-1, 2)
        return array[:, 0], array[:, 1]

    def tags(self) -> set[str]:
        return {tag for record in self.records for tag in record if "/" in tag}


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ only in their seed."""

    label: str
    runs: Sequence[RunCurve]

    @property
    def score_text(self) -> str:
        """Scores of the best policies over fresh episodes, for a legend; empty if no run has one."""
        scores = [run.score for run in self.runs if run.score is not None]
        if not scores:
            return ""
        if len(self.runs) == 1:
            return f"score: {format_score(scores[0])}"
        mean, fresh = sum(score.mean for score in scores) / len(scores), {score.episodes for score in scores}
        episodes = f"{' to '.join(map(str, sorted({min(fresh), max(fresh)})))} fresh episodes each"
        return f"score: {format_number(mean)}, mean of {len(scores)} best policies, {episodes}"


def plot(runs: Sequence[str | Path], x: str = "steps", y: Sequence[str] | None = None, smooth: int = 5,
         out: str | Path | None = None) -> Path:
    """Plot the run directories into `out` and return its path.

    Without `y`, training and evaluation returns share one panel; otherwise each tag has its own. Without `out`, the
    image is written to the first run's directory.
    """
    directories = [Path(run) for run in runs]
    if out is None:
        name = "learning_curve.png" if len(directories) == 1 else "comparison.png"
        out = directories[0] / "plots" / name
    target = Path(out)
    if target.suffix.lower() not in SUFFIXES:
        raise UserError(f"cannot write {target}: the name of a plot must end in {', '.join(SUFFIXES)}")
    figure = draw(group_runs([read_run(directory) for directory in directories]), x, y, smooth)
    with atomic_file(target) as partial:
        figure.savefig(partial, dpi=150)
    return target


def read_run(directory: Path) -> RunCurve:
    """Read config and metrics of one run directory."""
    if not (directory / "metrics.jsonl").is_file():
        raise UserError(f"{directory} has no metrics.jsonl: name a run directory, such as runs/NAME")
    records = read_metrics(directory / "metrics.jsonl")
    if not records:
        raise UserError(f"{directory} has no metric records yet: train it longer, then try again")
    config = read_yaml(directory / "config.yaml", no_follow_opener) if (directory / "config.yaml").is_file() else {}
    flat = {key: readable(format_value(value)) for key, value in flat_settings(config)}
    settings = {key: value for key, value in flat.items() if not key.startswith(IGNORED_KEYS)}
    return RunCurve(directory.resolve().name, settings.get("env.id", ""), settings, records, flat,
                    RunDirectory(directory).final_score())


def group_runs(runs: Sequence[RunCurve]) -> list[RunGroup]:
    """Group runs with equal settings, in order of first appearance, each group with a unique label."""
    buckets: dict[tuple[tuple[str, str], ...], list[RunCurve]] = {}
    for run in runs:
        buckets.setdefault(tuple(sorted(run.settings.items())), []).append(run)
    members = list(buckets.values())
    stems = [_stem([run.name for run in bucket]) for bucket in members]
    if len(set(stems)) < len(stems):
        stems = [f"{stem} {_difference(bucket[0], runs)}" for stem, bucket in zip(stems, members, strict=True)]
    counts = [f" ({len(bucket)} seeds)" if len(bucket) > 1 else "" for bucket in members]
    return [RunGroup(stem + count, bucket) for stem, count, bucket in zip(stems, counts, members, strict=True)]


def smoothed(values: np.ndarray, width: int) -> np.ndarray:
    """Centred moving mean over `width` points; the window shrinks at both ends instead of padding."""
    half = (width - 1) // 2
    total = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    low, high = np.maximum(index - half, 0), np.minimum(index + half + 1, len(values))
    return (total[high] - total[low]) / (high - low)


def mean_and_range(curves: Sequence[tuple[np.ndarray, np.ndarray]],
                   points: int = 400) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return (x, mean, lowest, highest), each [points], over the range that every curve covers.

    Beyond that range the mean would cover fewer and fewer seeds and jump whenever one ends.
    """
    start, end = max(xs[0] for xs, _ in curves), min(xs[-1] for xs, _ in curves)
    grid = np.linspace(start, max(start, end), points)
    values = np.stack([np.interp(grid, xs, ys) for xs, ys in curves])
    return grid, values.mean(0), values.min(0), values.max(0)


def format_tick(value: float) -> str:
    """Format a tick label: `0.25`, `300`, `20k`, `1.5M`."""
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:g}{letter}"
    return f"{value:g}"


def draw(groups: Sequence[RunGroup], x: str = "steps", y: Sequence[str] | None = None, smooth: int = 5) -> Any:
    """Return a matplotlib Figure with one panel per tag of `y` (None = both returns in one), one colour per group."""
    avoid_matplotlib_cache()
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("plotting needs matplotlib: pip install 'qfleet[plot]'") from None
    if x not in AXES:
        raise UserError(f"--x {x} is not known: choose one of {', '.join(AXES)}")
    if smooth < 1:
        raise UserError(f"--smooth {smooth} must be at least 1 (1 = no smoothing)")
    panels = [RETURNS] if not y else [(tag,) for tag in y]
    _check_tags(groups, x, panels)
    figure = Figure(figsize=(8, 1.2 + 3.4 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    scale, unit = _time_unit(groups) if x == "time" else (1.0, "")
    for panel, tags in zip(axes, panels, strict=True):
        for colour, members in zip(_cycled(len(groups)), groups, strict=True):
            for tag in tags:
                _draw_tag(panel, members, x, tag, smooth, (colour, scale, len(tags) > 1))
        _format_axes(panel, tags)
    axes[-1].set_xlabel(AXES[x][1] + unit)
    figure.suptitle(", ".join(sorted({run.env_id for members in groups for run in members.runs} - {""})) or "qfleet",
                    fontsize=13, fontweight="bold")
    return figure


def _draw_tag(panel: Any, members: RunGroup, x: str, tag: str, smooth: int, look: tuple[str, float, bool]) -> None:
    """Draw one tag of one group: raw curves faint, the smoothed (mean) curve strong, the range of seeds as a band.

    `look` is the colour, the scale of the x axis, and True if several tags share the panel.
    """
    colour, scale, shared = look
    curves = [(xs * scale, ys) for xs, ys in (run.curve(x, tag) for run in members.runs) if len(xs)]
    if not curves:
        return
    evaluated = tag.startswith("eval/")
    label = f"{members.label}: {'greedy evaluation' if evaluated else 'training'}" if shared else members.label
    label += f"\n{members.score_text}" if tag == "eval/mean_reward" and members.score_text else ""
    style = {"color": colour, "linewidth": 2.0, "label": label}
    if evaluated:
        smooth = 1  # an evaluation is already a mean over episodes
        style |= {"linestyle": "--", "linewidth": 1.4} if shared else {}
    if len(curves) == 1 and evaluated:
        style |= {"marker": "o", "markersize": 4}
    elif (smooth > 1 or len(curves) > 1) and not (evaluated and shared):
        for xs, ys in curves:
            panel.plot(xs, ys, color=colour, alpha=0.22, linewidth=0.9)
    if len(curves) == 1:
        xs, ys = curves[0]
        panel.plot(xs, smoothed(ys, smooth), **style)
        return
    grid, mean, low, high = mean_and_range(curves)
    if not (evaluated and shared):  # two bands of one colour would be indistinguishable
        panel.fill_between(grid, low, high, color=colour, alpha=0.15, linewidth=0)
    panel.plot(grid, smoothed(mean, smooth), **style)


def _format_axes(panel: Any, tags: Sequence[str]) -> None:
    from matplotlib.ticker import FuncFormatter

    panel.set_ylabel("return" if len(tags) > 1 else NAMES.get(tags[0], tags[0]))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_tick(value)))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_tick(value)))
    panel.grid(True, color="#d9d9d9", linewidth=0.7)
    panel.set_axisbelow(True)
    panel.margins(x=0.02)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    panel.legend(frameon=False, fontsize=9, loc="best")


def _check_tags(groups: Sequence[RunGroup], x: str, panels: Sequence[Sequence[str]]) -> None:
    """Raise UserError with the available tags if a panel would be empty."""
    runs = [run for members in groups for run in members.runs]
    known = sorted(set().union(*(run.tags() for run in runs)))
    for tags in panels:
        if not any(len(run.curve(x, tag)[0]) for run in runs for tag in tags):
            raise UserError(f"no run has points of {' or '.join(tags)} over {x}: {_instead(tags, known)}")


def _instead(tags: Sequence[str], known: Sequence[str]) -> str:
    """Suggest similar tags, or summarise the available ones."""
    near = [match for tag in tags for match in [*(name for name in known if tag in name.split("/")),
                                                *difflib.get_close_matches(tag, known, 3, 0.5)]]
    if near:
        return f"did you mean {' or '.join(dict.fromkeys(near[:3]))}?"
    if not known:
        return "nothing is logged yet"
    usual = [tag for tag in (*RETURNS, "train/loss", "time/fps") if tag in known] or known[:3]
    sections = dict.fromkeys(tag.partition("/")[0] for tag in known)
    return (f"there are {len(known)} tags in {', '.join(sections)}, such as {' and '.join(usual)}; "
            "`qfleet top RUN --json` lists them")


def _time_unit(groups: Sequence[RunGroup]) -> tuple[float, str]:
    longest = max(float(record.get("time_s") or 0) for members in groups for run in members.runs
                  for record in run.records)
    if longest < 300:
        return 1.0, " (s)"
    return (1 / 60, " (min)") if longest < 3 * 3600 else (1 / 3600, " (h)")


def _stem(names: Sequence[str]) -> str:
    """Common prefix of the names, without a seed at its end: `dqn-s1`, `dqn-s2` -> `dqn`."""
    if len(names) == 1:
        return names[0]
    common = "".join(letters[0] for letters in takewhile(lambda letters: len(set(letters)) == 1,
                                                         zip(*names, strict=False)))
    return re.sub(r"[-_.]+s?\d*$", "", common) or names[0]


def _difference(run: RunCurve, others: Sequence[RunCurve]) -> str:
    """Up to three settings that differ from other runs: `agent.double=False agent.n_step=1`."""
    keys = [key for key in run.settings if any(other.settings.get(key) != run.settings[key] for other in others)]
    return " ".join(f"{key}={run.settings[key]}" for key in keys[:3])


def format_value(value: Any) -> str:
    """Format a value as in a config file: `null`, `true`, `[32, 32]`."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{', '.join(format_value(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {format_value(item)}' for key, item in value.items())}}}"
    return str(value)


def _cycled(count: int) -> list[str]:
    return [COLOURS[index % len(COLOURS)] for index in range(count)]


def avoid_matplotlib_cache() -> None:
    """Use a temporary cache folder for matplotlib, unless it already has one in the home directory."""
    if "MPLCONFIGDIR" in os.environ or "matplotlib" in sys.modules:
        return
    homes = [("XDG_CACHE_HOME", ".cache"), ("XDG_CONFIG_HOME", ".config")]
    if any(Path(os.environ.get(name) or Path.home() / place, "matplotlib").exists() for name, place in homes):
        return
    os.environ["MPLCONFIGDIR"] = folder = tempfile.mkdtemp(prefix="qfleet-matplotlib-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
