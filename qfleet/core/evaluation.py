"""The result of an evaluation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Score:
    """Returns and lengths of the evaluation episodes.

    `version` is the number of updates behind the weights, `seconds` the duration of the evaluation.
    """

    returns: list[float]
    lengths: list[int]
    version: int
    seconds: float | None = None

    @property
    def mean(self) -> float:
        return float(np.mean(self.returns))

    @property
    def std(self) -> float:
        return float(np.std(self.returns))
