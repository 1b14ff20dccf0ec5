"""Exponentially decaying ε with an optional end (Clark et al. 2024), the same for all lanes."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field

from qfleet.config import Config as Section
from qfleet.config import Fraction, PositiveCount
from qfleet.core.agent import ExplorationParams


class Config(Section):
    epsilon_key: ClassVar = "start"

    kind: Literal["exponential"] = Field(
        "exponential", description="exploration strategy, by name; changing it resets the recipe's other explore keys")
    start: Fraction = Field(1.0, description="ε at the first step")
    end: Fraction = Field(0.01, description="ε that the decay approaches")
    steps: PositiveCount = Field(2_000_000, description="time constant of the decay, environment steps of the run")
    until_steps: PositiveCount | None = Field(
        None, description="environment steps of the run after which ε is 0; null = never")


class Exponential:
    """ε [N] as a function of the run's environment steps."""

    def __init__(self, cfg: Config, lanes: int) -> None:
        self.cfg, self.lanes = cfg, lanes

    def params(self, steps: int) -> ExplorationParams:
        cfg = self.cfg
        epsilon = cfg.end + (cfg.start - cfg.end) * math.exp(-steps / cfg.steps)
        if cfg.until_steps is not None and steps >= cfg.until_steps:
            epsilon = 0.0
        return ExplorationParams(torch.full((self.lanes,), epsilon))


def build(cfg: Config, lanes: int, first: int, total: int) -> Exponential:
    return Exponential(cfg, lanes)
