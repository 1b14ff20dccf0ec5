"""Constant ε, the same for all lanes. ε = 0 without network noise is the greedy policy, as in evaluation."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field

from qfleet.config import Config as Section
from qfleet.config import Fraction
from qfleet.core.agent import ExplorationParams


class Config(Section):
    epsilon_key: ClassVar = "epsilon"

    kind: Literal["constant"] = Field(
        "constant", description="exploration strategy, by name; changing it resets the recipe's other explore keys")
    epsilon: Fraction = Field(0.05, description="probability of a random action")


class Constant:
    """ε [N], the same at every step; `noise=False` (evaluation) also disables noisy layers."""

    def __init__(self, epsilon: float, lanes: int, noise: bool = False) -> None:
        self.fixed = ExplorationParams(torch.full((lanes,), epsilon), noise)

    def params(self, steps: int) -> ExplorationParams:
        return self.fixed


def build(cfg: Config, lanes: int, first: int, total: int) -> Constant:
    return Constant(cfg.epsilon, lanes, noise=True)
