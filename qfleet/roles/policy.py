"""A network that acts: what an actor, an evaluator and a user's script have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from qfleet.agent import Agent, Arm, Memory
from qfleet.roles.flat import Flat
from qfleet.roles.seeds import restore_rng
from qfleet.types import Obs, Published

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Policy:
    """`act(obs, arm)` in every lane with the newest weights it was given.

    `version` is the number of updates behind those weights; -1 means still the initial ones.
    """

    def __init__(self, agent: Agent, seed: int, device: torch.device, precision: str = "fp32") -> None:
        self.agent, self.device = agent, device
        self.flat = Flat(seeded_network(agent, seed).to(device).requires_grad_(False).eval(), PRECISIONS[precision])
        self.rng = torch.Generator(device).manual_seed(seed)
        self.version = -1
        self.memory: Memory = None

    def refresh(self, weights: Published) -> int | None:
        """Take newer weights if there are any; returns by how many updates they are newer."""
        news = weights.fetch(self.version)
        if news is None:
            return None
        gained = news[0] - max(0, self.version)
        self.load(news[1], news[0])
        return gained

    def load(self, state: Mapping[str, torch.Tensor], version: int) -> None:
        self.flat.load(state)
        self.version = version

    @torch.inference_mode()
    def act(self, obs: Obs, arm: Arm) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Actions [N] and extra columns, for observations {leaf: [N, ...]}."""
        tensors = {name: torch.from_numpy(leaf).to(self.device) for name, leaf in obs.items()}
        arm = replace(arm, epsilon=arm.epsilon.to(self.device))
        decision = self.agent.act(self.flat.net, tensors, self.memory, arm, self.rng)
        self.memory = decision.memory
        return decision.action.cpu().numpy(), {name: x.cpu().numpy() for name, x in decision.extras.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"version": self.version, "weights": self.flat.state(), "rng": self.rng.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.load(state["weights"], state["version"])
        restore_rng(self.rng, state["rng"])


def seeded_network(agent: Agent, seed: int) -> torch.nn.Module:
    """The agent's network with initial weights that depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return agent.network()
