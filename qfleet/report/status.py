"""Status of a run from its metric records: progress, rates, metrics and bottleneck, formatted for display."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from qfleet.core.final_score import FinalScore
from qfleet.report.bottleneck import (
    RECENT_RECORDS,
    SPEEDUPS,
    Bottleneck,
    acting_shares,
    find_bottleneck,
    percent,
    recent_means,
    unused_speedups,
)
from qfleet.report.return_gap import ReturnGap, ReturnGapDetector, comparable_episodes

Record = Mapping[str, Any]


def format_duration(seconds: float) -> str:
    """Format seconds: `0:42`, `12:05`, `3:07:00`, `2 d 03:07`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour:02}:{minute:02}"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def format_number(value: float) -> str:
    """Format a number of any size in few characters: `0.0312`, `21.4`, `12,345`, `1.2e+08`."""
    if abs(value) >= 1e8:
        return f"{value:.3g}"
    if abs(value) >= 1000 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.3g}"


def format_score(score: FinalScore) -> str:
    """Format the score of a finished run: `228.8 ± 14.4 (standard error), best policy, 20 fresh episodes`."""
    error = "" if score.standard_error is None else f" ± {format_number(score.standard_error)} (standard error)"
    return (f"{format_number(score.mean)}{error}, best policy, {score.episodes:,} fresh "
            f"episode{'s' * (score.episodes != 1)}")


def format_size(count: float) -> str:
    """Format bytes with a decimal unit: `512 B`, `3.2 MB`."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


SHOWN_METRICS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("return", "rollout/ep_rew_mean", format_number),
    ("eval", "eval/mean_reward", format_number),
    ("best eval", "eval/best_reward", format_number),
    ("episode steps", "rollout/ep_len_mean", format_number),
    ("ε", "rollout/exploration_rate", format_number),
    ("loss", "train/loss", format_number),
    ("samples/insert", "replay/samples_per_insert", format_number),
    ("policy lag", "actor/policy_lag", format_number),
    ("replay steps", "replay/steps", format_number),
    ("replay", "replay/bytes", format_size),
    ("actors", "fleet/actors", format_number),
    ("learners", "server/learners", format_number),
    ("staleness", "server/staleness", format_number),
)
"""Label, tag and format of the displayed metrics, most important first; metrics without a value are left out."""


RATIO = "samples/insert"
LAG_OF_FLEET = "fleet/policy_lag"
LOOP = {"acting": "time/actor_share", "learning": "time/learner_share", "receiving": "time/inbox_share",
        "evaluating": "time/eval_share", "saving": "time/save_share", "idle": "time/idle_share"}
"""Parts of the time of the learner's process; in a fleet, other processes act and evaluate."""

BY_ROLE = {RATIO, "policy lag", "actors", "steps/s", "updates/s", "eval", "best eval"}
"""Metrics that the lines of a fleet's roles contain already."""


@dataclass(frozen=True)
class RunGoal:
    """End of the run, at `steps` or `updates`, whichever is reached first; None = no limit.

    `ratio` is the configured number of samples per insert, if known; `faster` are the unused speedups.
    `eval_episodes`: episodes per evaluation, if evaluations are comparable with the training.
    """

    steps: int | None
    updates: int | None = None
    ratio: float | None = None
    faster: tuple[str, ...] = SPEEDUPS
    eval_episodes: int | None = None

    @staticmethod
    def from_settings(settings: Mapping[str, Any], gpu: bool = True) -> RunGoal:
        """Read the goal from a config, which is not validated, so that nothing is imported.

        `gpu` is False if the machine is known to have none.
        """
        replay, learner = (found if isinstance(found := settings.get(name), Mapping) else {}
                           for name in ("replay", "learner"))
        steps, updates = (_number(settings.get(name)) for name in ("total_steps", "total_updates"))
        return RunGoal(
            None if steps is None else int(steps), None if updates is None else int(updates),
            _number(replay.get("samples_per_insert")),
            unused_speedups(settings.get("device"), learner.get("precision"), learner.get("capture") is True, gpu),
            comparable_episodes(settings))

    def fraction(self, record: Record) -> float:
        parts = [float(record.get(name) or 0) / limit
                 for name, limit in (("step", self.steps), ("updates", self.updates)) if limit]
        return min(1.0, max(parts, default=0.0))


class RunStatus:
    """Latest value of every tag, rates over the recent records, and the bottleneck they show."""

    def __init__(self, goal: RunGoal) -> None:
        self.goal = goal
        self.latest: dict[str, Any] = {}
        self.evaluated_at_s: float | None = None
        self._gap = ReturnGapDetector(goal.eval_episodes)
        self._recent: deque[Record] = deque(maxlen=RECENT_RECORDS)
        self._marks: deque[tuple[float, float, float]] = deque(maxlen=RECENT_RECORDS)

    def add(self, record: Record) -> None:
        self.latest.update({tag: value for tag, value in record.items() if value is not None})
        self._recent.append(record)
        self._gap.add(record)
        if record.get("eval/mean_reward") is not None:
            self.evaluated_at_s = self.count("time_s")
        if "time_s" in record:
            self._marks.append((float(record["time_s"]), self.count("step"), self.count("updates")))

    def count(self, name: str) -> float:
        return float(self.latest.get(name, 0))

    def rates(self) -> tuple[float | None, float | None]:
        """Steps and updates per second; None before two records at different times."""
        if len(self._marks) < 2 or self._marks[-1][0] <= self._marks[0][0]:
            return None, None
        (t0, s0, u0), (t1, s1, u1) = self._marks[0], self._marks[-1]
        return (s1 - s0) / (t1 - t0), (u1 - u0) / (t1 - t0)

    def seconds_left(self) -> float | None:
        steps_s, updates_s = self.rates()
        left = [(limit - self.count(name)) / rate
                for name, limit, rate in (("step", self.goal.steps, steps_s), ("updates", self.goal.updates, updates_s))
                if limit and rate]
        return max(0.0, min(left)) if left else None

    def metrics(self) -> list[tuple[str, str]]:
        steps_s, updates_s = self.rates()
        rates = [("steps/s", steps_s), ("updates/s", updates_s)]
        known = self.latest
        if LAG_OF_FLEET in known:  # the lag of all actors, not of the last one that fetched weights
            known = known | {"actor/policy_lag": round(float(known[LAG_OF_FLEET]))}
        shown = [(label, form(float(known[tag]))) for label, tag, form in SHOWN_METRICS if tag in known]
        if self.goal.ratio is not None:
            target = format_number(self.goal.ratio)
            shown = [(label, f"{text}/{target}" if label == RATIO else text) for label, text in shown]
        return shown + [(label, format_number(round(rate))) for label, rate in rates if rate is not None]

    def bottleneck(self) -> Bottleneck | None:
        return find_bottleneck(self._recent, self.goal.faster)

    def return_gap(self) -> ReturnGap | None:
        """The difference, if evaluations return far less than the training."""
        return self._gap.gap()

    def roles(self) -> list[tuple[str, str]]:
        """One line per role of a fleet; empty for a run in one process."""
        if "fleet/actors" not in self.latest:
            return []
        metrics, mean = dict(self.metrics()), self.recent_means()
        learning = [f"{text} {label}" for label in ("updates/s", RATIO) if (text := metrics.get(label))]
        return [("actors", _joined([f"{metrics['actors']} alive", f"{metrics.get('steps/s', '-')} steps/s",
                                    _parts(acting_shares(mean)),
                                    f"policy lag {format_number(round(mean.get(LAG_OF_FLEET, 0)))}"])),
                ("learner", _joined([*learning, _parts(self.loop_shares())])),
                ("evaluator", self._last_evaluation())]

    def recent_means(self) -> dict[str, float]:
        return recent_means(self._recent)

    def loop_shares(self) -> dict[str, float]:
        """Recent fractions of the time of the learner's process, 0 to 1 by name."""
        mean = self.recent_means()
        return {name: mean[tag] for name, tag in LOOP.items() if tag in mean}

    def _last_evaluation(self) -> str:
        if self.evaluated_at_s is None:
            return "no evaluation yet"
        ago = format_duration(max(0.0, self.count("time_s") - self.evaluated_at_s))
        newest, best = (format_number(self.count(f"eval/{name}_reward")) for name in ("mean", "best"))
        return f"{newest}  best {best}  {ago} ago"

    def headline(self, running: bool = True, between: str = "  ") -> str:
        """Return `12,800 / 50,000 steps  26%  0:31 left`, without the time left if the run is not running."""
        name = "steps" if self.goal.steps else "updates"
        limit = self.goal.steps or self.goal.updates
        done = self.count("step" if self.goal.steps else "updates")
        parts = [f"{done:,.0f} / {limit:,} {name}" if limit else f"{done:,.0f} {name}"]
        parts.append(f"{self.goal.fraction(self.latest):.0%}")
        left = self.seconds_left() if running else None
        if left is not None:
            parts.append(f"{format_duration(left)} left")
        return between.join(parts)


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _parts(found: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {percent(share)}" for name, share in found.items())


def _joined(parts: list[str]) -> str:
    return "  ".join(part for part in parts if part)
