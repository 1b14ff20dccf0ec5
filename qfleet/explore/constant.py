"""One ε for all lanes, for ever; ε = 0 is greedy play, as in evaluation, which also leaves a network's noise out."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from qfleet.config import Config as Section
from qfleet.config import Fraction
from qfleet.core.agent import ExplorationParams


class Config(Section):
    kind: Literal["constant"] = Field(
        "constant", description="exploration strategy, by name; changing it resets the recipe's other explore keys")
    epsilon: Fraction = Field(0.05, description="probability of a random action")


class Constant:
    """ε [N], the same at every step; for those who only show what was learnt, without noise."""

    def __init__(self, epsilon: float, lanes: int, noise: bool = False) -> None:
        self.fixed = ExplorationParams(torch.full((lanes,), epsilon), noise)

    def params(self, steps: int) -> ExplorationParams:
        return self.fixed


def build(cfg: Config, lanes: int, first: int, total: int) -> Constant:
    return Constant(cfg.epsilon, lanes, noise=True)
