"""Metrics from `info`: one number per episode and metric of `env.info_metrics`."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from qfleet.core.errors import UserError

log = logging.getLogger("qfleet.envs")

REDUCERS: dict[str, Callable[[float, float], float]] = {"sum": float.__add__, "mean": float.__add__, "max": max,
                                                        "min": min}
"""How two values of an episode are combined; a mean is the sum divided by the number of steps that have the value."""

METRIC = re.compile(rf"(?:({'|'.join(REDUCERS)})\()?([^()]+?)(\))?")

MAX_TAG_LENGTH = 80
MAX_VALUE = 1e38
"""Sums over an episode stay finite, in messages between processes too."""


@dataclass(frozen=True)
class InfoMetric:
    """A number in `info`, at the end of an episode or reduced over its steps.

    `success` is the last value of `info["success"]`, `sum(cost)` the sum over the steps, and so for mean, max and min.
    A dot leads into a nested dict.
    """

    key: str
    reducer: str | None

    @classmethod
    def parse(cls, text: str) -> InfoMetric:
        """Raises ValueError for anything but KEY, sum(KEY), mean(KEY), max(KEY) or min(KEY)."""
        found = METRIC.fullmatch(text.strip())
        if found is None or (found[1] is None) != (found[3] is None) or not found[2].strip():
            raise ValueError(f"{text!r}: write a key of info, or {', '.join(f'{name}(key)' for name in REDUCERS)}")
        metric = cls(found[2].strip(), found[1])
        if len(metric.tag) > MAX_TAG_LENGTH:
            raise ValueError(f"{text!r}: is longer than {MAX_TAG_LENGTH} characters")
        return metric

    @property
    def tag(self) -> str:
        """Name of the metric: `success`, `cost_sum`."""
        key = re.sub(r"[^A-Za-z0-9_./-]", "_", self.key)
        return key if self.reducer is None else f"{key}_{self.reducer}"

    def value(self, info: Mapping[str, Any]) -> float | None:
        """Its value in the `info` of a step, or None if that lacks it; UserError if it is no number."""
        found: Any = info
        for name in self.key.split("."):
            if not isinstance(found, Mapping) or name not in found:
                return None
            found = found[name]
        try:
            number = float("nan" if isinstance(found, str | bytes) else found)
        except (TypeError, ValueError):
            number = float("nan")
        if not abs(number) <= MAX_VALUE:
            raise UserError(f"env.info_metrics: info[{self.key!r}] is {found!r:.60}, which is not a finite number; "
                            "leave the key out of info where there is no value")
        return number


@dataclass
class EpisodeInfo:
    """Info metrics of the current episode of one lane."""

    metrics: Sequence[InfoMetric]
    _values: dict[str, float] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)

    def add(self, info: Mapping[str, Any]) -> None:
        """Take the `info` of a step."""
        for metric in self.metrics:
            value = metric.value(info)
            if value is None:
                continue
            tag, combine = metric.tag, REDUCERS.get(metric.reducer or "")
            self._values[tag] = value if combine is None or tag not in self._values else combine(
                self._values[tag], value)
            self._counts[tag] = self._counts.get(tag, 0) + 1

    def finish(self, env: str, info: Mapping[str, Any]) -> dict[str, float]:
        """Metrics of the episode that ends with a step's `info`; those that no step had are missing."""
        means = {metric.tag for metric in self.metrics if metric.reducer == "mean"}
        values = {tag: value / self._counts[tag] if tag in means else value for tag, value in self._values.items()}
        for metric in self.metrics:
            if metric.tag not in values:
                _warn_missing(env, metric.key, tuple(_keys(info)))
        self.reset()
        return values

    def reset(self) -> None:
        """Start a new episode."""
        self._values, self._counts = {}, {}


def parse_metrics(texts: Sequence[str]) -> list[InfoMetric]:
    """The metrics of `env.info_metrics`. Raises ValueError for one that is malformed, or two of the same name."""
    metrics = [InfoMetric.parse(text) for text in texts]
    tags = [metric.tag for metric in metrics]
    for tag in tags:
        if tags.count(tag) > 1:
            raise ValueError(f"two metrics have the name {tag!r}")
    return metrics


_warned: set[tuple[str, str]] = set()


def _warn_missing(env: str, key: str, present: Sequence[str]) -> None:
    """Warn once per environment and key."""
    if (env, key) in _warned:
        return
    _warned.add((env, key))
    close = get_close_matches(key, present, 1)
    has = f"did you mean {close[0]}?" if close else f"info has {', '.join(present[:10]) or 'no keys'}"
    log.warning("env.info_metrics: no step of an episode of %s had %r in info, and such episodes do not count in its "
                "mean; %s", env, key, has)


def _keys(info: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """All keys, those of nested dicts after a dot."""
    for name, value in info.items() if isinstance(info, Mapping) else ():
        if isinstance(value, Mapping):
            yield from _keys(value, f"{path}{name}.")
        else:
            yield f"{path}{name}"
