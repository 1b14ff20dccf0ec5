"""DDPG (Lillicrap et al. 2016): Q-learning for continuous actions with a learned deterministic policy.

y = r + γ Q⁻(s', μ⁻(s')), and the policy μ maximises Q(s, μ(s)). With `twin`, `smoothing` and `policy_delay` this is TD3
(Fujimoto et al. 2018). All but the representation of returns is in `actor_critic`.
Shapes: B items.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from qfleet.algos.actor_critic import ControlConfig, CriticModel, make_control_agent
from qfleet.core.agent import Agent
from qfleet.core.env import EnvSpec
from qfleet.maths.bellman import squared


class Config(ControlConfig):
    """Agent section for DDPG."""

    algo: Literal["ddpg"] = Field(
        "ddpg", description="algorithm, by name; changing it resets the recipe's other agent keys")


def build(cfg: Config, spec: EnvSpec) -> Agent:
    """Build the DDPG agent."""
    def mean(distribution: torch.Tensor) -> torch.Tensor:
        return distribution.squeeze(1)

    def make_target(ret: torch.Tensor, discount: torch.Tensor, distribution: torch.Tensor) -> torch.Tensor:
        return ret + discount * mean(distribution)

    def td_loss(distribution: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(y − Q(s, a))²; the priority is |y − Q(s, a)|."""
        q = mean(distribution)
        return squared(q, y), (y - q.detach()).abs()

    return make_control_agent(cfg, spec, CriticModel(outputs=1, mean=mean, make_target=make_target, td_loss=td_loss))
