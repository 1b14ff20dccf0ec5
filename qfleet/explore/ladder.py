"""Constant ε per lane (Ape-X, Horgan et al. 2018): ε_i = ε^(1 + α i / (N − 1)) for N lanes in the run."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field

from qfleet.config import Config as Section
from qfleet.config import Count, Fraction, NonNegative
from qfleet.core.agent import ExplorationParams


class Config(Section):
    epsilon_key: ClassVar = "epsilon"

    kind: Literal["ladder"] = Field(
        "ladder", description="exploration strategy, by name; changing it resets the recipe's other explore keys")
    epsilon: Fraction = Field(
        0.4, description="ε of the first lane; lane i of N has epsilon^(1 + steepness i / (N − 1))")
    steepness: NonNegative = Field(
        7.0, description="α of the paper: the last lane has epsilon^(1 + steepness); larger = less exploration")
    warmup_steps: Count = Field(
        0, description="environment steps of the run over which ε falls linearly from 1 to these values")


class Ladder:
    """ε [N]; during warm-up interpolated linearly from 1."""

    def __init__(self, cfg: Config, lanes: int, first: int, total: int) -> None:
        self.cfg = cfg
        index = torch.arange(first, first + lanes) % total
        self.epsilon = cfg.epsilon ** (1 + cfg.steepness * index / max(1, total - 1))

    def params(self, steps: int) -> ExplorationParams:
        if steps >= self.cfg.warmup_steps:
            return ExplorationParams(self.epsilon)
        done = steps / self.cfg.warmup_steps
        return ExplorationParams((1 - done) + done * self.epsilon)


def build(cfg: Config, lanes: int, first: int, total: int) -> Ladder:
    return Ladder(cfg, lanes, first, total)
