"""An Ornstein-Uhlenbeck process on continuous actions (Lillicrap et al. 2016): x' = (1 − θ) x + σ ξ, ξ normal.

Noise that lasts: it pushes one way for about 1/θ steps, as things that have mass must be pushed to get anywhere. In the
long run its size is σ / √(1 − (1 − θ)²). It begins at 0 with every episode.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from qfleet.config import Config as Section
from qfleet.config import Count, Fraction, NonNegative
from qfleet.explore.gaussian import Shaken, rungs


class Config(Section):
    kind: Literal["ou"] = Field("ou", description="the kind of exploration")
    sigma: NonNegative = Field(0.2, description="what is added per step in the first lane, of actions within ±1")
    sigma_last: NonNegative | None = Field(
        None, description="the same in the last lane, those between in equal steps; none = as in the first")
    theta: Fraction = Field(0.15, description="share of the noise that is lost per step")
    warmup_steps: Count = Field(0, description="steps of the run with random actions before those of the policy")


def build(cfg: Config, lanes: int, first: int, total: int) -> Shaken:
    return Shaken(rungs(cfg.sigma, cfg.sigma_last, lanes, first, total), cfg.theta, cfg.warmup_steps)
