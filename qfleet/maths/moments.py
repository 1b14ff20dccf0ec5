"""Count, mean and squared deviations of rows, merged exactly (Chan et al. 1979). Shapes: R rows, K values of a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Moments:
    """Moments of rows of K values: their number, their mean [K] and the sum of squared deviations from it [K]."""

    count: float
    mean: np.ndarray
    square: np.ndarray

    @classmethod
    def empty(cls, size: int) -> Moments:
        return cls(0.0, np.zeros(size), np.zeros(size))

    @classmethod
    def of(cls, rows: np.ndarray) -> Moments:
        """Moments of rows [R, K]."""
        if not len(rows):
            return cls.empty(rows.shape[1])
        mean = rows.mean(0, dtype=np.float64)
        return cls(float(len(rows)), mean, np.square(rows - mean).sum(0))

    def merge(self, other: Moments) -> Moments:
        """Moments of the rows of both."""
        if not self.count or not other.count:
            return self if self.count else other
        count, step = self.count + other.count, other.mean - self.mean
        spread = step * step * (self.count * other.count / count)
        return Moments(count, self.mean + step * (other.count / count), self.square + other.square + spread)

    def to_row(self) -> np.ndarray:
        """All numbers as one vector [1 + 2K]."""
        return np.concatenate([[self.count], self.mean, self.square])

    @classmethod
    def from_row(cls, row: Sequence[float] | np.ndarray) -> Moments:
        values = np.asarray(row, np.float64)
        mean, square = np.split(values[1:], 2)
        return cls(float(values[0]), mean, square)
