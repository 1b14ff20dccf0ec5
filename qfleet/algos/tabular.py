"""Tabular Q-learning (Watkins 1989) with a replay buffer, for environments with a limited number of discrete states.

Q(s, a) ← Q(s, a) + α (y − Q(s, a)), where y = r + γ max_a Q⁻(s', a). The table is the "network" of an agent of the
value family, so that n-step returns, double Q-learning, Munchausen, prioritised replay and all topologies work as they
do there. Shapes: B items, S states, A actions.

The loss of an item is B/(2k) (y − Q(s, a))², where k items of the batch have the same state and action. The gradient
of its mean over the batch is the mean of −(y − Q(s, a)) over these k. With `learner.optimizer=torch.optim:SGD` the
learning rate is therefore α, whatever the batch size. Without k, a batch with more than 2/α items of one state and
action would move its value further from the target than it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, cast

import torch
from pydantic import Field
from torch import nn
from torch.nn import functional as F

from qfleet.algos.value_based import (
    BootstrapTarget,
    Prediction,
    ValueBasedConfig,
    make_return_model,
    make_value_agent,
    target_values,
    unscale,
)
from qfleet.config import PositiveCount
from qfleet.core.agent import Agent, Loss
from qfleet.core.env import EnvSpec, Leaf
from qfleet.core.errors import UserError
from qfleet.core.replay import Sample
from qfleet.maths.bellman import gather_actions
from qfleet.networks.noisy import Noise

MAX_STATES = 100_000
"""Largest table: its gradient is dense, so that an update costs time for every state."""

NETWORK_KEYS = ("dueling", "noisy", "encoder", "torso", "hidden", "norm")


class Config(ValueBasedConfig):
    """Agent section for tabular Q-learning."""

    algo: Literal["tabular"] = Field(
        "tabular", description="algorithm, by name; changing it resets the recipe's other agent keys")
    hidden: tuple[PositiveCount, ...] = Field((), description="widths of the hidden dense layers")

    def inactive(self) -> dict[str, str]:
        why = "with agent.algo=tabular, which has a table instead of a network; agent.algo=dqn has one"
        return super().inactive() | dict.fromkeys(NETWORK_KEYS, why)

    def unused_for(self, spec: EnvSpec) -> dict[str, str]:
        return {}


def count_states(observation: Mapping[str, Leaf]) -> int | None:
    """Number of combinations of all entries; None if an observation is not discrete."""
    if any(leaf.kind != "category" for leaf in observation.values()):
        return None
    count = 1
    for leaf in observation.values():
        for size in leaf.sizes:
            count *= size
    return count


class QTable(nn.Module):
    """{leaf: [B, k]} -> q [B, A]: one row of a table for every combination of the observation's entries.

    Values start near 0, with differences that only break ties.
    """

    def __init__(self, observation: Mapping[str, Leaf], states: int, actions: int) -> None:
        super().__init__()
        self.leaves = dict(observation)
        self.table = nn.Parameter(1e-3 * torch.randn(states, actions))

    def forward(self, obs: Mapping[str, torch.Tensor], noise: Noise | None = None) -> torch.Tensor:
        return F.embedding(self.states(obs), self.table).float()

    def states(self, obs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Rows [B] of the table."""
        state: torch.Tensor | int = 0
        for name, leaf in self.leaves.items():
            entries = obs[name].long().flatten(1) if obs[name].ndim > 1 else obs[name].long().unsqueeze(1)
            for i, size in enumerate(leaf.sizes):
                state = state * size + entries[:, i]
        return torch.as_tensor(state)


def build(cfg: Config, spec: EnvSpec) -> Agent:
    """Build the agent; UserError if the observations are not discrete, or have too many combinations."""
    states = count_states(spec.observation)
    if states is None:
        raise UserError(f"agent.algo=tabular needs Discrete observations, and those of {spec.id} are not: "
                        "use agent.algo=dqn")
    if states > MAX_STATES:
        raise UserError(f"agent.algo=tabular has a table of at most {MAX_STATES:,} states, and the observations of "
                        f"{spec.id} have {states:,} combinations: use agent.algo=dqn")

    def td_loss(
        prediction: Prediction, action: torch.Tensor, bootstrap: BootstrapTarget, next_prediction: Prediction
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """½ (y − Q(s, a))²; the priority is |y − Q(s, a)|."""
        error = target_values(cfg, bootstrap, next_prediction.distribution) - gather_actions(
            prediction.distribution, action)
        return 0.5 * error.square(), error.detach().abs()

    model = make_return_model(cfg, spec, lambda q: unscale(cfg, q), td_loss)
    table = replace(model, network=lambda: QTable(spec.observation, states, spec.num_actions))
    agent = make_value_agent(cfg, spec, table)

    def loss(net: nn.Module, target: nn.Module, batch: Sample, rng: torch.Generator) -> Loss:
        found = agent.loss(net, target, batch, rng)
        entry = cast(QTable, net).states(batch.obs(0)) * spec.num_actions + batch.rows["action"][:, 0]
        equal = (entry.unsqueeze(1) == entry).sum(1)
        return replace(found, per_item=found.per_item * (len(entry) / equal))

    return replace(agent, loss=loss)
