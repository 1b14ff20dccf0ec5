"""Pink noise on continuous actions (Eberhard et al. 2023): its power falls with the frequency f as 1/f.

Pink noise is correlated over all times from one step to hundreds of steps. It changes the action as often as
white noise and also pushes in one direction for as long as an Ornstein-Uhlenbeck process, so no time scale has
to be chosen. It is the sum of stationary first-order processes of equal variance, whose time constants grow by
a factor of 4. Every episode starts with a draw from the stationary distribution, so the standard deviation is σ
at every step.

Uniformly random actions are white noise. During warm-up, pink noise with a larger σ replaces them: it is added
to the action of the policy, which is close to 0 before the first update, and the sum is clipped. After warm-up
the noise falls to σ within a few hundred steps.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field

from qfleet.config import Config as Section
from qfleet.config import Count, NonNegative
from qfleet.core.agent import NOISE_COMPONENTS, NoiseProcess
from qfleet.explore.gaussian import ActionNoise, sigma_ladder

TIME_CONSTANTS = tuple(4.0**k for k in range(NOISE_COMPONENTS))
"""Time constants of the components, 1 to 256 steps: the spectrum is 1/f for periods of 2π to 2π · 256 steps."""


class Config(Section):
    continuous: ClassVar = True

    kind: Literal["pink"] = Field(
        "pink", description="exploration strategy, by name; changing it resets the recipe's other explore keys")
    sigma: NonNegative = Field(
        0.3, description="standard deviation of the noise in the first lane; actions lie within ±1")
    sigma_last: NonNegative | None = Field(
        None, description="standard deviation in the last lane, linear in between; null = the same in all lanes")
    warmup_steps: Count = Field(
        0, description="environment steps of the run during which the noise has warmup_sigma in all lanes")
    warmup_sigma: NonNegative = Field(
        1.0, description="standard deviation of the noise during warm-up; that of uniformly random actions is 0.58")

    def inactive(self) -> dict[str, str]:
        return {} if self.warmup_steps else {"warmup_sigma": "without explore.warmup_steps"}


def pink_noise() -> NoiseProcess:
    """Sum of stationary first-order processes whose total variance is σ²."""
    decay = torch.exp(-1 / torch.tensor(TIME_CONSTANTS))
    start = torch.full_like(decay, len(decay) ** -0.5)
    return NoiseProcess(decay, start * (1 - decay**2).sqrt(), start)


def build(cfg: Config, lanes: int, first: int, total: int) -> ActionNoise:
    sigma = sigma_ladder(cfg.sigma, cfg.sigma_last, lanes, first, total)
    return ActionNoise(sigma, pink_noise(), cfg.warmup_steps, cfg.warmup_sigma)
