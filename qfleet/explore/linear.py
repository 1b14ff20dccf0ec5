"""Linearly decaying ε (Mnih et al. 2015), the same for all lanes."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field

from qfleet.config import Config as Section
from qfleet.config import Fraction, PositiveCount
from qfleet.core.agent import ExplorationParams


class Config(Section):
    epsilon_key: ClassVar = "start"

    kind: Literal["linear"] = Field(
        "linear", description="exploration strategy, by name; changing it resets the recipe's other explore keys")
    start: Fraction = Field(1.0, description="ε at the first step")
    end: Fraction = Field(0.01, description="final ε")
    steps: PositiveCount = Field(
        250_000, description="environment steps of the run over which ε falls linearly from start to end")


class Linear:
    """ε [N] as a function of the run's environment steps."""

    def __init__(self, cfg: Config, lanes: int) -> None:
        self.cfg, self.lanes = cfg, lanes

    def params(self, steps: int) -> ExplorationParams:
        done = min(1.0, steps / self.cfg.steps)
        return ExplorationParams(torch.full((self.lanes,), self.cfg.start + done * (self.cfg.end - self.cfg.start)))


def build(cfg: Config, lanes: int, first: int, total: int) -> Linear:
    return Linear(cfg, lanes)
