"""DQN (Mnih et al. 2015).

Q-learning with a replay buffer and a target network: y = r + γ max_a Q⁻(s', a). The options it shares with the other
value-based agents are in `value_based`; `replay.alpha` sets prioritised replay, `explore` the exploration.
Shapes: B items, A actions.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import nn

from qfleet.algos.value_based import (
    BootstrapTarget,
    Prediction,
    QNetwork,
    ReturnModel,
    ValueBasedConfig,
    make_value_agent,
    target_values,
    unscale,
)
from qfleet.config import Positive
from qfleet.core.agent import Agent, Tensors
from qfleet.core.env import EnvSpec
from qfleet.maths.bellman import gather_actions, huber, squared
from qfleet.networks.noisy import Noise


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
    def read_prediction(columns: Tensors) -> Prediction:
        return Prediction(unscale(cfg, columns["law"]), columns["law"])

    def predict(net: nn.Module, obs: Tensors, noise: Noise | None, rng: torch.Generator) -> Prediction:
        return read_prediction({"law": net(obs, noise)})

    def td_loss(
        prediction: Prediction, action: torch.Tensor, bootstrap: BootstrapTarget, next_prediction: Prediction
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss of y − Q(s, a); the priority is |y − Q(s, a)|."""
        q = gather_actions(prediction.distribution, action)
        y = target_values(cfg, bootstrap, next_prediction.distribution)
        per_item = huber(q, y, cfg.huber_delta) if cfg.loss == "huber" else squared(q, y)
        return per_item, (y - q.detach()).abs()

    return make_value_agent(
        cfg,
        spec,
        ReturnModel(
            network=lambda: QNetwork(cfg, spec), predict_online=predict, predict_target=predict,
            predict_for_acting=predict, read_prediction=read_prediction,
            priority_inputs={"law": ((spec.num_actions,), "float32")}, td_loss=td_loss),
    )
