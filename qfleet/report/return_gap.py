"""Detects evaluations that return far less than training episodes, which looks as if the agent did not learn."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from qfleet.core.final_score import standard_error

Record = Mapping[str, Any]

EVALUATIONS = 3
"""Evaluations in a row that have to be lower: a single one may be of weights that happen to be bad."""

LEAST_EPISODES = 20
"""Training episodes before their mean and spread are compared with anything."""

SPREADS = 2.0
"""Least difference in standard deviations of the training returns."""

ERRORS = 3.0
"""Least difference in standard errors of the evaluation."""

PROGRESS = 0.25
"""Least difference as a fraction of the range of all mean returns, of training and evaluations, so far."""

WINDOW = 100
"""Episodes in the mean of the training returns (`rollout/ep_rew_mean`)."""

GAP_LABEL = "evaluations far below the training"
REASON = ("an evaluation follows the greedy policy of one version of the weights; in training, exploration or the "
          "changing weights help to leave states in which that policy repeats its actions")
REMEDY = "see the page My agent does not learn, docs/not-learning.md"


@dataclass(frozen=True)
class ReturnGap:
    """Means of the last evaluations, and mean, standard deviation and number of the recent training returns."""

    evaluations: tuple[float, ...]
    training: float
    spread: float
    episodes: int

    @property
    def evidence(self) -> str:
        scores = ", ".join(f"{score:.4g}" for score in self.evaluations)
        return (f"the last {len(self.evaluations)} evaluations returned {scores}, the last {self.episodes} training "
                f"episodes {self.training:.4g} ± {self.spread:.3g} (standard deviation)")

    def to_json(self) -> dict[str, Any]:
        return {"evaluations": list(self.evaluations), "training": self.training, "spread": self.spread,
                "episodes": self.episodes, "evidence": self.evidence, "reason": REASON, "remedy": REMEDY}


class ReturnGapDetector:
    """Compares evaluations with the training returns at the time.

    Only evaluations far below the training are reported. The opposite is usual: exploration costs return.
    `eval_episodes` is the number of episodes of an evaluation; None: the two are not comparable.
    """

    def __init__(self, eval_episodes: int | None) -> None:
        self._eval_episodes = eval_episodes
        self._recent: deque[ReturnGap | None] = deque(maxlen=EVALUATIONS)
        self._low, self._high = math.inf, -math.inf

    def add(self, record: Record) -> None:
        """Add a metric record; only those of evaluations count."""
        score = _number(record, "eval/mean_reward")
        if score is None:
            return
        training, spread = _number(record, "rollout/ep_rew_mean"), _number(record, "rollout/ep_rew_std")
        episodes = min(int(_number(record, "episodes") or 0), WINDOW)
        known = [value for value in (score, training) if value is not None]
        self._low, self._high = min(self._low, *known), max(self._high, *known)
        if training is None or spread is None or episodes < LEAST_EPISODES or self._eval_episodes is None:
            self._recent.append(None)
            return
        error = standard_error(_number(record, "eval/std_reward") or 0.0, self._eval_episodes) or 0.0
        least = max(SPREADS * spread, ERRORS * error, PROGRESS * (self._high - self._low))
        wide = training - score > least
        self._recent.append(ReturnGap((score,), training, spread, episodes) if wide else None)

    def gap(self) -> ReturnGap | None:
        """The difference, if all of the last evaluations were far below the training."""
        found = [each for each in self._recent if each is not None]
        if len(found) < EVALUATIONS:
            return None
        last = found[-1]
        scores = tuple(score for each in found for score in each.evaluations)
        return ReturnGap(scores, last.training, last.spread, last.episodes)


def find_gap(records: Iterable[Record], settings: Mapping[str, Any]) -> ReturnGap | None:
    """The difference at the end of a run's records; `settings` is its config, which need not be complete."""
    detector = ReturnGapDetector(comparable_episodes(settings))
    for record in records:
        detector.add(record)
    return detector.gap()


def eval_episodes(settings: Mapping[str, Any]) -> int | None:
    """Episodes per evaluation in a config that is not validated; None if it does not say."""
    found = settings.get("eval")
    episodes = found.get("episodes") if isinstance(found, Mapping) else None
    return episodes if isinstance(episodes, int) and not isinstance(episodes, bool) and episodes > 0 else None


def comparable_episodes(settings: Mapping[str, Any]) -> int | None:
    """Episodes per evaluation; None if unknown, or if evaluations truncate episodes earlier than the training does."""
    found = settings.get("eval")
    truncated = isinstance(found, Mapping) and found.get("max_episode_steps") is not None
    return None if truncated else eval_episodes(settings)


def _number(record: Record, tag: str) -> float | None:
    value = record.get(tag)
    known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if known and value is not None else None
