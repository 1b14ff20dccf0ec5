"""εz-greedy exploration (Dabney et al. 2021): random actions that are repeated for a random number of steps.

Where ε-greedy takes one random action, a lane of εz-greedy repeats it n times, P(n) ∝ n^−μ. Most
repetitions are short, a few are long, so that exploration also reaches states that need the same action
many times in a row. ε is the share of random steps, as in ε-greedy: a lane that follows the policy begins
a repetition with probability ε / (ε + m (1 − ε)), where m is the mean of n.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field

from qfleet.config import Config as Section
from qfleet.config import Fraction, Positive, PositiveCount
from qfleet.core.agent import ExplorationParams
from qfleet.core.rng import restore_numpy_rng
from qfleet.explore import linear


class Config(Section):
    epsilon_key: ClassVar = "start"
    discrete: ClassVar = True

    kind: Literal["ez_greedy"] = Field(
        "ez_greedy", description="exploration strategy, by name; changing it resets the recipe's other explore keys")
    start: Fraction = Field(1.0, description="share of random steps at the start, ε")
    end: Fraction = Field(0.01, description="final ε")
    steps: PositiveCount = Field(
        250_000, description="environment steps of the run over which ε falls linearly from start to end")
    mu: Positive = Field(
        1.5, description="μ: a random action is taken n times in a row, P(n) ∝ n^−μ; larger = shorter repetitions")
    max_repeats: PositiveCount = Field(50, description="largest n, steps; 1 = ε-greedy")


class EzGreedy:
    """Repeated random actions per lane; implements `AdaptiveExplorer`, since repetitions are state."""

    def __init__(self, cfg: Config, lanes: int) -> None:
        self.lanes = lanes
        self.schedule = linear.Linear(linear.Config(start=cfg.start, end=cfg.end, steps=cfg.steps), lanes)
        repeats = np.arange(1, cfg.max_repeats + 1, dtype=np.float64)
        probability = repeats**-cfg.mu / (repeats**-cfg.mu).sum()
        self._mean, self._cumulative = float(repeats @ probability), np.cumsum(probability)[:-1]
        self.seed(0)

    def seed(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._left, self._choice = np.zeros(self.lanes, np.int64), np.zeros(self.lanes, np.float32)

    def params(self, steps: int) -> ExplorationParams:
        """ε is 1 for the lanes that repeat an action, and 0 for the others."""
        epsilon = self.schedule.params(steps).epsilon.double().numpy()
        chance, length, choice = self._rng.random((3, self.lanes))
        begins = (self._left == 0) & (chance < epsilon / (epsilon + self._mean * (1 - epsilon)))
        self._left[begins] = 1 + np.searchsorted(self._cumulative, length[begins], side="right")
        self._choice[begins] = choice[begins]
        random = self._left > 0
        self._left -= random
        return ExplorationParams(torch.from_numpy(random.astype(np.float32)),
                                 choice=torch.from_numpy(self._choice.copy()))

    def end_episode(self, lane: int, ret: float | None) -> None:
        self._left[lane] = 0

    def state_dict(self) -> dict[str, Any]:
        return {"rng": self._rng.bit_generator.state, "left": self._left.copy(), "choice": self._choice.copy()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        restore_numpy_rng(self._rng, state["rng"])
        self._left[:], self._choice[:] = state["left"], state["choice"]


def build(cfg: Config, lanes: int, first: int, total: int) -> EzGreedy:
    return EzGreedy(cfg, lanes)
