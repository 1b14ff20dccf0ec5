"""A fixed ε for each lane, on a ladder (Horgan et al. 2018): ε_i = base^(1 + α i / (N − 1)), N lanes in the run."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from qfleet.agent import Arm
from qfleet.config import Config as Section
from qfleet.config import Count, Fraction, NonNegative


class Config(Section):
    kind: Literal["ladder"] = Field("ladder", description="the kind of exploration")
    base: Fraction = Field(0.4, description="ε of the first lane")
    alpha: NonNegative = Field(7.0, description="how steeply the ladder falls")
    warmup_steps: Count = Field(0, description="steps over which ε comes down from 1 to the ladder")


class Ladder:
    """ε [N]; during warm-up blended with 1."""

    def __init__(self, cfg: Config, lanes: int, first: int, total: int) -> None:
        self.cfg = cfg
        rung = torch.arange(first, first + lanes) % total
        self.epsilon = cfg.base ** (1 + cfg.alpha * rung / max(1, total - 1))

    def arms(self, steps: int) -> Arm:
        if steps >= self.cfg.warmup_steps:
            return Arm(self.epsilon)
        done = steps / self.cfg.warmup_steps
        return Arm((1 - done) + done * self.epsilon)


def build(cfg: Config, lanes: int, first: int, total: int) -> Ladder:
    return Ladder(cfg, lanes, first, total)
