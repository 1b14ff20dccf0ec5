"""DDPG (Lillicrap et al. 2016): Q-learning for continuous actions. What is best to do is learnt, too, by a policy.

y = r + γ Q⁻(s', μ⁻(s')), and the policy μ climbs Q(s, μ(s)). With `twin`, `smoothing` and `policy_delay` this is TD3
(Fujimoto et al. 2018). All but the representation of returns is in `_control`.
Shapes: B items.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from qfleet.algos._actor_critic import ControlConfig, CriticModel, make_control_agent
from qfleet.core.agent import Agent
from qfleet.core.env import EnvSpec
from qfleet.maths.bellman import squared


class Config(ControlConfig):
    """The agent section of a run that trains DDPG."""

    algo: Literal["ddpg"] = Field(
        "ddpg", description="algorithm, by name; changing it resets the recipe's other agent keys")


def build(cfg: Config, spec: EnvSpec) -> Agent:
    """The DDPG agent for an environment."""
    def mean(law: torch.Tensor) -> torch.Tensor:
        return law.squeeze(1)

    def target(ret: torch.Tensor, discount: torch.Tensor, law: torch.Tensor) -> torch.Tensor:
        return ret + discount * mean(law)

    def compare(law: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(y − Q(s, a))², and as priority |y − Q(s, a)|."""
        q = mean(law)
        return squared(q, y), (y - q.detach()).abs()

    return make_control_agent(cfg, spec, CriticModel(outputs=1, mean=mean, make_target=target, td_loss=compare))
