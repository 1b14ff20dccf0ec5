"""HL-Gauss (Farebrother et al. 2024): values learned by classification instead of regression.

The network predicts probabilities of bins, whose mean is the value of an action. The target y = r + γ Q⁻(s', a') is a
number as in DQN; it becomes a histogram of a Gaussian around y, and the loss is the cross-entropy to that histogram.
Shapes: B items, A actions, Z bins.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field

from qfleet.algos.categorical import CategoricalConfig
from qfleet.algos.value_based import (
    BootstrapTarget,
    Prediction,
    ValueBasedConfig,
    make_return_model,
    make_value_agent,
    target_values,
    unscale,
)
from qfleet.config import Integer, Positive
from qfleet.core.agent import Agent
from qfleet.core.env import EnvSpec
from qfleet.maths.bellman import gather_actions
from qfleet.maths.distributional import cross_entropy, gaussian_histogram


class Config(CategoricalConfig, ValueBasedConfig):
    """Agent section for HL-Gauss."""

    algo: Literal["hlgauss"] = Field(
        "hlgauss", description="algorithm, by name; changing it resets the recipe's other agent keys")
    atoms: Annotated[Integer, Field(ge=2)] = Field(51, description="number of bins between v_min and v_max")
    sigma_ratio: Positive = Field(
        0.75, description="σ of the Gaussian around a target, in bin widths: larger values spread it over more bins")

    def edges(self, like: torch.Tensor) -> torch.Tensor:
        """Bounds of the bins [Z + 1] on the device of `like`."""
        return torch.linspace(self.v_min, self.v_max, self.atoms + 1, device=like.device)


def build(cfg: Config, spec: EnvSpec) -> Agent:
    """Build the HL-Gauss agent."""
    def values(logits: torch.Tensor) -> torch.Tensor:
        """Means [...] of the predicted histograms [..., Z], in the units that the network learns."""
        edges = cfg.edges(logits)
        return (logits.softmax(-1) * (edges[:-1] + edges[1:]) / 2).sum(-1)

    def q_values(logits: torch.Tensor) -> torch.Tensor:
        return unscale(cfg, values(logits))

    def td_loss(
        prediction: Prediction, action: torch.Tensor, bootstrap: BootstrapTarget, next_prediction: Prediction
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cross-entropy to the histogram around y; the priority is |y − Q(s, a)|."""
        logits = gather_actions(prediction.distribution, action)
        y = target_values(cfg, bootstrap, values(next_prediction.distribution)).clamp(cfg.v_min, cfg.v_max)
        sigma = cfg.sigma_ratio * (cfg.v_max - cfg.v_min) / cfg.atoms
        per_item = cross_entropy(logits, gaussian_histogram(y, cfg.edges(logits), sigma))
        return per_item, (y - values(logits.detach())).abs()

    return make_value_agent(cfg, spec, make_return_model(cfg, spec, q_values, td_loss, (cfg.atoms,)))
