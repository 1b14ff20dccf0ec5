"""DQN (Mnih et al. 2015).

Q-learning with a replay buffer and a target network: y = r + γ max_a Q⁻(s', a). The options it shares with the other
value-based agents are in `value_based`; `replay.alpha` sets prioritised replay, `explore` the exploration.
Shapes: B items, A actions.
"""

from __future__ import annotations

from functools import partial
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
from qfleet.config import Positive
from qfleet.core.agent import Agent
from qfleet.core.env import EnvSpec
from qfleet.maths.bellman import gather_actions, huber, squared


class Config(ValueBasedConfig):
    """Agent section for DQN."""

    algo: Literal["dqn"] = Field(
        "dqn", description="algorithm, by name; changing it resets the recipe's other agent keys")
    loss: Literal["huber", "mse"] = Field("huber", description="loss of the TD error: huber, or mse (squared error)")
    huber_delta: Positive = Field(1.0, description="absolute TD error above which the Huber loss is linear")

    def inactive(self) -> dict[str, str]:
        return super().inactive() | ({"huber_delta": "with agent.loss=mse"} if self.loss == "mse" else {})


def build(cfg: Config, spec: EnvSpec) -> Agent:
    """Build the DQN agent."""
    def td_loss(
        prediction: Prediction, action: torch.Tensor, bootstrap: BootstrapTarget, next_prediction: Prediction
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss of y − Q(s, a); the priority is |y − Q(s, a)|."""
        q = gather_actions(prediction.distribution, action)
        y = target_values(cfg, bootstrap, next_prediction.distribution)
        per_item = huber(q, y, cfg.huber_delta) if cfg.loss == "huber" else squared(q, y)
        return per_item, (y - q.detach()).abs()

    return make_value_agent(cfg, spec, make_return_model(cfg, spec, partial(unscale, cfg), td_loss))
