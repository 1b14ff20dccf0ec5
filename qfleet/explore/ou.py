"""Ornstein-Uhlenbeck noise on continuous actions (Lillicrap et al. 2016): x' = (1 − θ) x + σ ξ, ξ ~ N(0, 1).

The noise is correlated over about 1/θ steps, which explores better in systems with inertia. Its stationary standard
deviation is σ / √(1 − (1 − θ)²). It starts at 0 in every episode.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from qfleet.config import Config as Section
from qfleet.config import Count, Fraction, NonNegative
from qfleet.core.agent import first_order_noise
from qfleet.explore.gaussian import ActionNoise, sigma_ladder


class Config(Section):
    continuous: ClassVar = True

    kind: Literal["ou"] = Field(
        "ou", description="exploration strategy, by name; changing it resets the recipe's other explore keys")
    sigma: NonNegative = Field(0.2, description="σ of the noise in the first lane, per step; actions lie within ±1")
    sigma_last: NonNegative | None = Field(
        None, description="σ in the last lane, linear in between; null = the same in all lanes")
    theta: Fraction = Field(
        0.15, description="θ: fraction by which the noise decays per step; it is correlated over about 1/θ steps")
    warmup_steps: Count = Field(
        0, description="environment steps of the run with uniformly random actions before the policy acts")


def build(cfg: Config, lanes: int, first: int, total: int) -> ActionNoise:
    sigma = sigma_ladder(cfg.sigma, cfg.sigma_last, lanes, first, total)
    return ActionNoise(sigma, first_order_noise(cfg.theta), cfg.warmup_steps)
