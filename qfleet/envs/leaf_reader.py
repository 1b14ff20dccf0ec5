"""Reader of one observation leaf, and the errors of observations that do not match their space."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from qfleet.core.env import Leaf


class SpaceMismatch(Exception):
    """Observation that does not match the environment's observation space."""


class OutOfSpace(SpaceMismatch):
    """Observation of the right shape with a value outside the space."""


@dataclass(frozen=True)
class LeafReader:
    """One leaf: its path in the raw observation and the conversion of one frame (no stack).

    `resized`: the conversion changes pixels.
    """

    name: str
    path: tuple[Any, ...]
    leaf: Leaf
    convert: Callable[[Any], np.ndarray | float]
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    resized: bool = False

    def extract(self, raw: Any) -> Any:
        for key in self.path:
            raw = raw[key]
        return raw
