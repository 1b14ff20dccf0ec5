"""C51 (Bellemare et al. 2017): the law of the return, as probabilities of fixed atoms, instead of its mean.

The target r + γ z lies between the atoms z of the support; it is projected back onto them, and the cross-entropy to
that is the loss. With double, dueling, noisy layers, n-step returns and replay prioritised by KL this is Rainbow
(Hessel et al. 2018).
Shapes: B items, A actions, Z atoms.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import nn

from qfleet.algos._categorical import CategoricalConfig
from qfleet.algos._value_based import (
    BootstrapTarget,
    Prediction,
    QNetwork,
    ReturnModel,
    ValueBasedConfig,
    make_value_agent,
    rescale,
    unscale,
)
from qfleet.core.agent import Agent, Tensors
from qfleet.core.env import EnvSpec
from qfleet.maths.bellman import gather_actions
from qfleet.maths.distributional import categorical_projection, cross_entropy, entropy
from qfleet.networks.noisy import Noise


class Config(CategoricalConfig, ValueBasedConfig):
    """The agent section of a run that trains C51."""

    algo: Literal["c51"] = Field(
        "c51", description="algorithm, by name; changing it resets the recipe's other agent keys")


def build(cfg: Config, spec: EnvSpec) -> Agent:
    """The C51 agent for an environment."""
    def view(hints: Tensors) -> Prediction:
        logits = hints["law"]
        return Prediction((logits.softmax(2) * unscale(cfg, cfg.support(logits))).sum(2), logits)

    def look(net: nn.Module, obs: Tensors, noise: Noise | None, rng: torch.Generator) -> Prediction:
        return view({"law": net(obs, noise)})

    def target(goal: BootstrapTarget, logits_BAZ: torch.Tensor) -> torch.Tensor:
        """m [B, Z]: the law of ret + discount · Z(s', a'), projected; of a soft policy the mixture over a' ~ π."""
        z = unscale(cfg, cfg.support(logits_BAZ))
        if goal.action is not None:
            probs = gather_actions(logits_BAZ, goal.action).softmax(1)
            z_next = z.expand_as(probs)
        else:
            assert goal.pi is not None and goal.entropy is not None
            probs = (goal.pi[:, :, None] * logits_BAZ.softmax(2)).flatten(1)
            z_next = (z + goal.entropy[:, :, None]).flatten(1)
        values = rescale(cfg, goal.ret[:, None] + goal.discount[:, None] * z_next)
        return categorical_projection(values, probs, cfg.support(logits_BAZ))

    def compare(
        here: Prediction, action: torch.Tensor, goal: BootstrapTarget, there: Prediction
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cross-entropy to the projected target, and as priority the divergence KL(m ‖ p), as Rainbow has it."""
        m = target(goal, there.distribution)
        per_item = cross_entropy(gather_actions(here.distribution, action), m)
        return per_item, (per_item.detach() - entropy(m)).clamp(min=0)

    return make_value_agent(
        cfg,
        spec,
        ReturnModel(
            network=lambda: QNetwork(cfg, spec, (cfg.atoms,)), predict_online=look, predict_target=look,
            predict_for_acting=look, read_prediction=view, td_loss=compare,
            priority_inputs={"law": ((spec.num_actions, cfg.atoms), "float32")}),
    )
