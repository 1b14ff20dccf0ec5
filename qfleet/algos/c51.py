"""C51 (Bellemare et al. 2017): the return distribution as probabilities of fixed atoms.

The target r + γ z falls between the atoms z of the support; it is projected onto them, and the loss is the
cross-entropy to the projection. With double, dueling, noisy layers, n-step returns and replay prioritised by KL
divergence this is Rainbow (Hessel et al. 2018).
Shapes: B items, A actions, Z atoms.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from qfleet.algos.categorical import CategoricalConfig
from qfleet.algos.value_based import (
    BootstrapTarget,
    Prediction,
    ValueBasedConfig,
    make_return_model,
    make_value_agent,
    rescale,
    unscale,
)
from qfleet.core.agent import Agent
from qfleet.core.env import EnvSpec
from qfleet.maths.bellman import gather_actions
from qfleet.maths.distributional import categorical_projection, cross_entropy, entropy


class Config(CategoricalConfig, ValueBasedConfig):
    """Agent section for C51."""

    algo: Literal["c51"] = Field(
        "c51", description="algorithm, by name; changing it resets the recipe's other agent keys")


def build(cfg: Config, spec: EnvSpec) -> Agent:
    """Build the C51 agent."""
    def q_values(logits: torch.Tensor) -> torch.Tensor:
        return (logits.softmax(2) * unscale(cfg, cfg.support(logits))).sum(2)

    def projected_target(bootstrap: BootstrapTarget, logits_BAZ: torch.Tensor) -> torch.Tensor:
        """m [B, Z]: projected distribution of ret + discount · Z(s', a'); soft targets mix over a' ~ π."""
        z = unscale(cfg, cfg.support(logits_BAZ))
        if bootstrap.action is not None:
            probs = gather_actions(logits_BAZ, bootstrap.action).softmax(1)
            z_next = z.expand_as(probs)
        else:
            assert bootstrap.pi is not None and bootstrap.entropy is not None
            probs = (bootstrap.pi[:, :, None] * logits_BAZ.softmax(2)).flatten(1)
            z_next = (z + bootstrap.entropy[:, :, None]).flatten(1)
        values = rescale(cfg, bootstrap.ret[:, None] + bootstrap.discount[:, None] * z_next)
        return categorical_projection(values, probs, cfg.support(logits_BAZ))

    def td_loss(
        prediction: Prediction, action: torch.Tensor, bootstrap: BootstrapTarget, next_prediction: Prediction
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cross-entropy to the projected target; the priority is KL(m ‖ p), as in Rainbow."""
        m = projected_target(bootstrap, next_prediction.distribution)
        per_item = cross_entropy(gather_actions(prediction.distribution, action), m)
        return per_item, (per_item.detach() - entropy(m)).clamp(min=0)

    return make_value_agent(cfg, spec, make_return_model(cfg, spec, q_values, td_loss, (cfg.atoms,)))
