"""QR-DQN (Dabney et al. 2018a): the return distribution as quantiles at fixed fractions.

C51 fixes the values and learns probabilities; QR-DQN fixes the probabilities 1/N and learns the values θ_i by quantile
regression to y_j = r + γ θ⁻_j(s', a'), so the support need not be known in advance.
Shapes: B items, A actions, N quantiles.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from qfleet.algos.value_based import (
    BootstrapTarget,
    Prediction,
    ValueBasedConfig,
    make_return_model,
    make_value_agent,
    target_values,
    unscale,
)
from qfleet.config import NonNegative, PositiveCount
from qfleet.core.agent import Agent
from qfleet.core.env import EnvSpec
from qfleet.maths.bellman import gather_actions
from qfleet.maths.distributional import midpoints, pairwise_td_errors, quantile_huber


class Config(ValueBasedConfig):
    """Agent section for QR-DQN."""

    algo: Literal["qr"] = Field(
        "qr", description="algorithm, by name; changing it resets the recipe's other agent keys")
    quantiles: PositiveCount = Field(200, description="number of quantiles per action")
    kappa: NonNegative = Field(
        1.0, description="κ of the quantile Huber loss: absolute error above which it is linear; 0 = plain quantile "
                         "loss")


def build(cfg: Config, spec: EnvSpec) -> Agent:
    """Build the QR-DQN agent."""
    def q_values(quantiles: torch.Tensor) -> torch.Tensor:
        return unscale(cfg, quantiles).mean(2)

    def td_loss(
        prediction: Prediction, action: torch.Tensor, bootstrap: BootstrapTarget, next_prediction: Prediction
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantile regression to the target's quantiles; the priority is the mean |δ_ij| over all pairs."""
        theta = gather_actions(prediction.distribution, action)
        y = target_values(cfg, bootstrap, next_prediction.distribution)
        tau = midpoints(cfg.quantiles, theta.device)
        return quantile_huber(theta, tau, y, cfg.kappa), pairwise_td_errors(theta.detach(), y).abs().mean((1, 2))

    return make_value_agent(cfg, spec, make_return_model(cfg, spec, q_values, td_loss, (cfg.quantiles,)))
