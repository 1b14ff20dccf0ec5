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

from qfleet.agent import Agent, Tensors
from qfleet.algos._values import Goal, Kind, QNetwork, Values, View, agent_of, real, targets
from qfleet.config import Positive
from qfleet.maths.bellman import huber, pick, squared
from qfleet.nets.noisy import Noise
from qfleet.types import EnvSpec


class Config(Values):
    """The agent section of a run that trains DQN."""

    algo: Literal["dqn"] = Field(
        "dqn", description="algorithm, by name; changing it resets the recipe's other agent keys")
    loss: Literal["huber", "mse"] = Field("huber", description="loss of the TD error: huber, or mse (squared error)")
    huber_delta: Positive = Field(1.0, description="absolute TD error above which the Huber loss is linear")

    def inactive(self) -> dict[str, str]:
        return super().inactive() | ({"huber_delta": "with agent.loss=mse"} if self.loss == "mse" else {})


def build(cfg: Config, spec: EnvSpec) -> Agent:
    """The DQN agent for an environment."""
    def view(hints: Tensors) -> View:
        return View(real(cfg, hints["law"]), hints["law"])

    def look(net: nn.Module, obs: Tensors, noise: Noise | None, rng: torch.Generator) -> View:
        return view({"law": net(obs, noise)})

    def compare(here: View, action: torch.Tensor, goal: Goal, there: View) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of y − Q(s, a), and as priority |y − Q(s, a)|."""
        q, y = pick(here.law, action), targets(cfg, goal, there.law)
        per_item = huber(q, y, cfg.huber_delta) if cfg.loss == "huber" else squared(q, y)
        return per_item, (y - q.detach()).abs()

    return agent_of(cfg, spec, Kind(network=lambda: QNetwork(cfg, spec), learn=look, bootstrap=look, choose=look,
                                    view=view, hints={"law": ((spec.actions,), "float32")}, compare=compare))
