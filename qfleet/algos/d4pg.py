"""D4PG (Barth-Maron et al. 2018): DDPG with a distributional critic, n-step returns and prioritised replay.

The critic is C51's for a single action: probabilities of fixed atoms, the target projected onto them. The number of
actors is set by `env.lanes` and `actors`, prioritisation by `replay.alpha`; all else is in `actor_critic`. In the
paper policy and critic have the same learning rate (1e-4); in DDPG the policy has a tenth of the critic's.
Shapes: B items, Z atoms.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from qfleet.algos.actor_critic import ControlConfig, CriticModel, make_control_agent
from qfleet.algos.categorical import CategoricalConfig
from qfleet.config import Positive, PositiveCount, Real
from qfleet.core.agent import Agent
from qfleet.core.env import EnvSpec
from qfleet.maths.distributional import categorical_projection, cross_entropy, entropy


class Config(CategoricalConfig, ControlConfig):
    """Agent section for D4PG."""

    algo: Literal["d4pg"] = Field(
        "d4pg", description="algorithm, by name; changing it resets the recipe's other agent keys")
    n_step: PositiveCount = Field(5, description="n of n-step returns: rewards summed before bootstrapping, steps")
    policy_rate: Positive = Field(1.0, description="learning rate of the policy as a multiple of learner.learning_rate")
    v_min: Real = Field(-150.0, description="lower end of the support; smaller returns are clipped to it")
    v_max: Real = Field(150.0, description="upper end of the support; larger returns are clipped to it")


def build(cfg: Config, spec: EnvSpec) -> Agent:
    """Build the D4PG agent."""
    def mean(logits: torch.Tensor) -> torch.Tensor:
        return (logits.softmax(1) * cfg.support(logits)).sum(1)

    def make_target(ret: torch.Tensor, discount: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        z = cfg.support(logits)
        return categorical_projection(ret[:, None] + discount[:, None] * z, logits.softmax(1), z)

    def td_loss(logits: torch.Tensor, m: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cross-entropy to the projected target; the priority is KL(m ‖ p)."""
        per_item = cross_entropy(logits, m)
        return per_item, (per_item.detach() - entropy(m)).clamp(min=0)

    model = CriticModel(outputs=cfg.atoms, mean=mean, make_target=make_target, td_loss=td_loss)
    return make_control_agent(cfg, spec, model)
