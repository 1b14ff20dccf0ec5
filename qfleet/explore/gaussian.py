"""Gaussian noise on continuous actions, independent at every step (Fujimoto et al. 2018), with σ per lane."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field

from qfleet.config import Config as Section
from qfleet.config import Count, NonNegative
from qfleet.core.agent import WHITE_NOISE, ExplorationParams, NoiseProcess


class Config(Section):
    continuous: ClassVar = True

    kind: Literal["gaussian"] = Field(
        "gaussian", description="exploration strategy, by name; changing it resets the recipe's other explore keys")
    sigma: NonNegative = Field(
        0.1, description="standard deviation of the noise in the first lane; actions lie within ±1")
    sigma_last: NonNegative | None = Field(
        None, description="standard deviation in the last lane, linear in between; null = the same in all lanes")
    warmup_steps: Count = Field(
        0, description="environment steps of the run with uniformly random actions before the policy acts")


class ActionNoise:
    """σ [N] per lane. During warm-up ε is 1; or, with `warmup_sigma`, the noise has that scale in all lanes instead."""

    def __init__(self, sigma: torch.Tensor, process: NoiseProcess, warmup_steps: int,
                 warmup_sigma: float | None = None) -> None:
        self.warmup_steps = warmup_steps
        random, zero = torch.ones_like(sigma), torch.zeros_like(sigma)
        self._policy = ExplorationParams(zero, sigma=sigma, process=process)
        self._warmup = (ExplorationParams(random, sigma=sigma, process=process) if warmup_sigma is None else
                        ExplorationParams(zero, sigma=warmup_sigma * random, process=process))

    def params(self, steps: int) -> ExplorationParams:
        return self._warmup if steps < self.warmup_steps else self._policy


def sigma_ladder(first: float, last: float | None, lanes: int, begin: int, total: int) -> torch.Tensor:
    """σ [N] of the lanes from `begin` on, spaced linearly from `first` to `last` over the run's `total` lanes."""
    position = torch.arange(begin, begin + lanes) % total / max(1, total - 1)
    return first + ((first if last is None else last) - first) * position


def build(cfg: Config, lanes: int, first: int, total: int) -> ActionNoise:
    return ActionNoise(sigma_ladder(cfg.sigma, cfg.sigma_last, lanes, first, total), WHITE_NOISE, cfg.warmup_steps)
