"""QR-DQN (Dabney et al. 2018a): the law of the return as quantiles at fixed levels.

Where C51 fixes the values and learns probabilities, this fixes the probabilities 1/N and learns values θ_i, by quantile
regression to y_j = r + γ θ⁻_j(s', a'): no support has to be known in advance.
Shapes: B items, A actions, N quantiles.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import nn

from qfleet.algos._value_based import (
    BootstrapTarget,
    Prediction,
    QNetwork,
    ReturnModel,
    ValueBasedConfig,
    make_value_agent,
    target_values,
    unscale,
)
from qfleet.config import NonNegative, PositiveCount
from qfleet.core.agent import Agent, Tensors
from qfleet.core.env import EnvSpec
from qfleet.maths.bellman import gather_actions
from qfleet.maths.distributional import midpoints, pairwise_td_errors, quantile_huber
from qfleet.networks.noisy import Noise


class Config(ValueBasedConfig):
    """The agent section of a run that trains QR-DQN."""

    algo: Literal["qr"] = Field(
        "qr", description="algorithm, by name; changing it resets the recipe's other agent keys")
    quantiles: PositiveCount = Field(200, description="number of quantiles per action")
    kappa: NonNegative = Field(
        1.0, description="κ of the quantile Huber loss: absolute error above which it is linear; 0 = plain quantile "
                         "loss")


def build(cfg: Config, spec: EnvSpec) -> Agent:
    """The QR-DQN agent for an environment."""
    def view(hints: Tensors) -> Prediction:
        return Prediction(unscale(cfg, hints["law"]).mean(2), hints["law"])

    def look(net: nn.Module, obs: Tensors, noise: Noise | None, rng: torch.Generator) -> Prediction:
        return view({"law": net(obs, noise)})

    def compare(
        here: Prediction, action: torch.Tensor, goal: BootstrapTarget, there: Prediction
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantile regression to the target's quantiles; as priority the mean |δ_ij| of all pairs."""
        theta, y = gather_actions(here.distribution, action), target_values(cfg, goal, there.distribution)
        tau = midpoints(cfg.quantiles, theta.device)
        return quantile_huber(theta, tau, y, cfg.kappa), pairwise_td_errors(theta.detach(), y).abs().mean((1, 2))

    return make_value_agent(
        cfg,
        spec,
        ReturnModel(
            network=lambda: QNetwork(cfg, spec, (cfg.quantiles,)), predict_online=look, predict_target=look,
            predict_for_acting=look, read_prediction=view, td_loss=compare,
            priority_inputs={"law": ((spec.num_actions, cfg.quantiles), "float32")}),
    )
