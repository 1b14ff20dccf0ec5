"""C51 (Bellemare et al. 2017): the law of the return, as probabilities of fixed atoms, instead of its mean.

The target r + γ z lies between the atoms z of the support; it is projected back onto them, and the cross-entropy to
that is the loss. With double, dueling, noisy layers, n-step returns and replay prioritised by KL this is Rainbow
(Hessel et al. 2018).
Shapes: B items, A actions, Z atoms.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator
from torch import nn

from qfleet.agent import Agent, Tensors
from qfleet.algos._values import Goal, Kind, QNetwork, Values, View, agent_of, learnt, real
from qfleet.config import Real, Whole
from qfleet.maths.bellman import pick
from qfleet.maths.distributional import categorical_projection, cross_entropy, entropy
from qfleet.nets.noisy import Noise
from qfleet.types import EnvSpec


class Config(Values):
    """The agent section of a run that trains C51."""

    algo: Literal["c51"] = Field("c51", description="the algorithm")
    atoms: Annotated[Whole, Field(ge=2)] = Field(51, description="atoms of the support")
    v_min: Real = Field(-10.0, description="least return that can be told, in the units that are learnt")
    v_max: Real = Field(10.0, description="largest return that can be told, in the units that are learnt")

    @model_validator(mode="after")
    def _ordered(self) -> Config:
        if self.v_min >= self.v_max:
            raise ValueError(f"agent.v_min={self.v_min:g} is not below agent.v_max={self.v_max:g}: raise v_max")
        return self


def build(cfg: Config, spec: EnvSpec) -> Agent:
    """The C51 agent for an environment."""
    def support(like: torch.Tensor) -> torch.Tensor:
        return torch.linspace(cfg.v_min, cfg.v_max, cfg.atoms, device=like.device)

    def view(hints: Tensors) -> View:
        logits = hints["law"]
        return View((logits.softmax(2) * real(cfg, support(logits))).sum(2), logits)

    def look(net: nn.Module, obs: Tensors, noise: Noise | None, rng: torch.Generator) -> View:
        return view({"law": net(obs, noise)})

    def target(goal: Goal, logits_BAZ: torch.Tensor) -> torch.Tensor:
        """m [B, Z]: the law of ret + discount · Z(s', a'), projected; of a soft policy the mixture over a' ~ π."""
        z = real(cfg, support(logits_BAZ))
        if goal.action is not None:
            probs = pick(logits_BAZ, goal.action).softmax(1)
            z_next = z.expand_as(probs)
        else:
            assert goal.pi is not None and goal.entropy is not None
            probs = (goal.pi[:, :, None] * logits_BAZ.softmax(2)).flatten(1)
            z_next = (z + goal.entropy[:, :, None]).flatten(1)
        values = learnt(cfg, goal.ret[:, None] + goal.discount[:, None] * z_next)
        return categorical_projection(values, probs, support(logits_BAZ))

    def compare(here: View, action: torch.Tensor, goal: Goal, there: View) -> tuple[torch.Tensor, torch.Tensor]:
        """Cross-entropy to the projected target, and as priority the divergence KL(m ‖ p), as Rainbow has it."""
        m = target(goal, there.law)
        per_item = cross_entropy(pick(here.law, action), m)
        return per_item, (per_item.detach() - entropy(m)).clamp(min=0)

    return agent_of(cfg, spec, Kind(network=lambda: QNetwork(cfg, spec, (cfg.atoms,)), learn=look, bootstrap=look,
                                    choose=look, view=view, compare=compare,
                                    hints={"law": ((spec.actions, cfg.atoms), "float32")}))
