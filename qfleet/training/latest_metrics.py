"""Latest value of every metric, with a message for a tag that is not among them."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from qfleet.core.errors import UserError


class UnknownMetric(UserError, KeyError):
    """There is no metric of this tag, or no value yet."""

    __str__ = Exception.__str__  # that of KeyError shows a Python repr


class LatestMetrics(dict[str, Any]):
    """A copy of the latest values; `get`, `in` and iteration are those of a dict."""

    def __init__(self, values: Mapping[str, Any], log_period_steps: int) -> None:
        super().__init__(values)
        self._log_period_steps = log_period_steps

    def __missing__(self, tag: object) -> Any:
        use = f"use metrics.get({tag!r}, 0) for a metric that comes later"
        if not self:
            raise UnknownMetric(f"metrics: there is no record yet, and so no {tag!r}; one is written every "
                                f"run.log_period_steps={self._log_period_steps} steps: {use}")
        close = get_close_matches(str(tag), self, 3)
        hint = f"did you mean {' or '.join(close)}? Otherwise " if close else ""
        raise UnknownMetric(f"metrics: no record so far has a {tag!r}: {hint}{use}")
