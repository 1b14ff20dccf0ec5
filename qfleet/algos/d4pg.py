"""D4PG (Barth-Maron et al. 2018): DDPG whose critic tells the law of the return, by n steps, from prioritised replay.

The critic is C51's, for one action: probabilities of fixed atoms, the target projected onto them. K actors are a matter
of `env.lanes` and `actors`, priorities of `replay.alpha`; all else is in `_control`. Policy and critic learn at one
rate in the paper (1e-4), where DDPG's policy has a tenth of its critic's.
Shapes: B items, Z atoms.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from qfleet.algos._actor_critic import ControlConfig, CriticModel, make_control_agent
from qfleet.algos._categorical import CategoricalConfig
from qfleet.config import Positive, PositiveCount, Real
from qfleet.core.agent import Agent
from qfleet.core.env import EnvSpec
from qfleet.maths.distributional import categorical_projection, cross_entropy, entropy


class Config(CategoricalConfig, ControlConfig):
    """The agent section of a run that trains D4PG."""

    algo: Literal["d4pg"] = Field(
        "d4pg", description="algorithm, by name; changing it resets the recipe's other agent keys")
    n_step: PositiveCount = Field(5, description="n of n-step returns: rewards summed before bootstrapping, steps")
    policy_rate: Positive = Field(1.0, description="learning rate of the policy as a multiple of learner.learning_rate")
    v_min: Real = Field(-150.0, description="lower end of the support; smaller returns are clipped to it")
    v_max: Real = Field(150.0, description="upper end of the support; larger returns are clipped to it")


def build(cfg: Config, spec: EnvSpec) -> Agent:
    """The D4PG agent for an environment."""
    def mean(logits: torch.Tensor) -> torch.Tensor:
        return (logits.softmax(1) * cfg.support(logits)).sum(1)

    def target(ret: torch.Tensor, discount: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        z = cfg.support(logits)
        return categorical_projection(ret[:, None] + discount[:, None] * z, logits.softmax(1), z)

    def compare(logits: torch.Tensor, m: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cross-entropy to the projected target, and as priority the divergence KL(m ‖ p)."""
        per_item = cross_entropy(logits, m)
        return per_item, (per_item.detach() - entropy(m)).clamp(min=0)

    return make_control_agent(cfg, spec, CriticModel(outputs=cfg.atoms, mean=mean, make_target=target, td_loss=compare))
