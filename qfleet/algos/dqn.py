"""DQN (Mnih et al. 2015) and its orthogonal switches.

Q-learning with a replay memory and a target network: y = r + γ max_a Q⁻(s', a). What may be switched on beside it, with
every other way to represent returns as well, is in `_values`; prioritised replay is a matter of `replay.alpha`,
exploration of `explore`.
Shapes: B items, A actions.
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
from qfleet.config import Positive
from qfleet.core.agent import Agent, Tensors
from qfleet.core.env import EnvSpec
from qfleet.maths.bellman import gather_actions, huber, squared
from qfleet.networks.noisy import Noise


class Config(ValueBasedConfig):
    """The agent section of a run that trains DQN."""

    algo: Literal["dqn"] = Field(
        "dqn", description="algorithm, by name; changing it resets the recipe's other agent keys")
    loss: Literal["huber", "mse"] = Field("huber", description="loss of the TD error: huber, or mse (squared error)")
    huber_delta: Positive = Field(1.0, description="absolute TD error above which the Huber loss is linear")

    def inactive(self) -> dict[str, str]:
        return super().inactive() | ({"huber_delta": "with agent.loss=mse"} if self.loss == "mse" else {})


def build(cfg: Config, spec: EnvSpec) -> Agent:
    """The DQN agent for an environment."""
    def view(hints: Tensors) -> Prediction:
        return Prediction(unscale(cfg, hints["law"]), hints["law"])

    def look(net: nn.Module, obs: Tensors, noise: Noise | None, rng: torch.Generator) -> Prediction:
        return view({"law": net(obs, noise)})

    def compare(
        here: Prediction, action: torch.Tensor, goal: BootstrapTarget, there: Prediction
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of y − Q(s, a), and as priority |y − Q(s, a)|."""
        q, y = gather_actions(here.distribution, action), target_values(cfg, goal, there.distribution)
        per_item = huber(q, y, cfg.huber_delta) if cfg.loss == "huber" else squared(q, y)
        return per_item, (y - q.detach()).abs()

    return make_value_agent(
        cfg,
        spec,
        ReturnModel(
            network=lambda: QNetwork(cfg, spec), predict_online=look, predict_target=look,
            predict_for_acting=look, read_prediction=view,
            priority_inputs={"law": ((spec.num_actions,), "float32")}, td_loss=compare),
    )
