"""NGU's policy mixture (Badia et al. 2020a) for few lanes: every episode follows a random arm; ε per lane is a ladder.

In the paper each of 256 actors follows one policy throughout; with few lanes some policies would never act.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field

from qfleet.config import Config as Section
from qfleet.config import Count, Fraction, NonNegative, PositiveCount
from qfleet.core.agent import ExplorationParams
from qfleet.core.rng import restore_numpy_rng
from qfleet.explore.ladder import Config as LadderConfig
from qfleet.explore.ladder import Ladder


class Config(Section):
    kind: Literal["mixture"] = Field(
        "mixture", description="exploration strategy, by name; changing it resets the recipe's other explore keys")
    arms: PositiveCount = Field(32, description="arms to draw from, one per episode; must equal agent.arms")
    epsilon: Fraction = Field(
        0.4, description="ε of the first lane; lane i of N has epsilon^(1 + steepness · i / (N − 1))")
    steepness: NonNegative = Field(8.0, description="the last lane has ε = epsilon^(1 + steepness)")
    warmup_steps: Count = Field(
        0, description="environment steps of the run over which ε falls linearly from 1 to these values")

    def ladder(self, lanes: int, first: int, total: int) -> Ladder:
        cfg = LadderConfig(epsilon=self.epsilon, steepness=self.steepness, warmup_steps=self.warmup_steps)
        return Ladder(cfg, lanes, first, total)


class Mixture:
    """One arm per lane, drawn uniformly for every episode."""

    def __init__(self, ladder: Ladder, lanes: int, arms: int) -> None:
        self.ladder, self.lanes, self.count = ladder, lanes, arms
        self.seed(0)

    def seed(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._arm = self._rng.integers(self.count, size=self.lanes)

    def params(self, steps: int) -> ExplorationParams:
        return ExplorationParams(
            self.ladder.params(steps).epsilon, index=torch.from_numpy(self._arm.copy()), count=self.count
        )

    def end_episode(self, lane: int, ret: float | None) -> None:
        self._arm[lane] = self._rng.integers(self.count)

    def state_dict(self) -> dict[str, Any]:
        return {"rng": self._rng.bit_generator.state, "arm": self._arm.copy()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        restore_numpy_rng(self._rng, state["rng"])
        self._arm[:] = state["arm"]


def build(cfg: Config, lanes: int, first: int, total: int) -> Mixture:
    return Mixture(cfg.ladder(lanes, first, total), lanes, cfg.arms)
