"""The result of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Score:
    """Returns and lengths of the evaluation episodes.

    `version` is the number of updates behind the weights, `seconds` the duration of the evaluation, `info` the mean of
    each of `env.info_metrics` over the episodes that have it.
    """

    returns: list[float]
    lengths: list[int]
    version: int
    seconds: float | None = None
    info: Mapping[str, float] = field(default_factory=dict)

    @property
    def mean(self) -> float:
        return float(np.mean(self.returns))

    @property
    def std(self) -> float:
        return float(np.std(self.returns))
