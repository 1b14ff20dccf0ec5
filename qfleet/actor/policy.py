"""A network that acts: what an actor, an evaluator and a user's script have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from qfleet.core.agent import Agent, ExplorationParams, Memory
from qfleet.core.compute import PRECISIONS, seeded_network, set_current_device
from qfleet.core.env import Obs
from qfleet.core.rng import restore_rng
from qfleet.core.weights import WeightSource
from qfleet.learner.flat_params import Flat
from qfleet.maths.aligned import aligned_tensor


class Policy:
    """`act(obs, arm)` in every lane with the newest weights it was given.

    `version` is the number of updates behind those weights; -1 means still the initial ones. An agent with a memory is
    told when episodes start (`begin`), what a step brought and where an episode is over (`observe`).
    """

    def __init__(self, agent: Agent, seed: int, device: torch.device, precision: str = "fp32") -> None:
        self.agent, self.device = agent, device
        set_current_device(device)
        self.flat = Flat(seeded_network(agent, seed).to(device).requires_grad_(False).eval(), PRECISIONS[precision])
        self.rng = torch.Generator(device).manual_seed(seed)
        self.version = -1
        self.memory: Memory = None
        self._persistent: Mapping[str, torch.Tensor] = {}
        self.graph_policies: dict[
            tuple[int, tuple[str, ...]], Any
        ] = {}  # its reflexes, by lanes and what else is wanted

    def refresh(self, weights: WeightSource) -> int | None:
        """Take newer weights if there are any; returns by how many updates they are newer."""
        news = weights.fetch(self.version)
        if news is None:
            return None
        gained = news[0] - max(0, self.version)
        self.load(news[1], news[0])
        return gained

    def load(self, state: Mapping[str, torch.Tensor], version: int) -> None:
        self.flat.load(state, self.agent.eval_buffers)  # which checkpoints of 0.1 do not have
        self.version = version

    @torch.inference_mode()
    def begin(self, lanes: int) -> None:
        """Start an episode in every lane, remembering none before."""
        if (recall := self.agent.recurrent_state) is not None:
            kept = {name: value.to(self.device) for name, value in self.persistent().items()}
            self.memory = recall.initial(lanes, self.device) | kept

    def observe(self, reward: np.ndarray, over: np.ndarray) -> None:
        """What the last choices brought [N]; where an episode is over [N], the next one starts."""
        if (recall := self.agent.recurrent_state) is None:
            return
        with torch.inference_mode():
            self.memory = recall.observe(self.memory, aligned_tensor(reward).to(self.device))
            if over.any():
                self.memory = recall.reset(self.memory, torch.from_numpy(over).to(self.device))

    def persistent(self) -> Mapping[str, torch.Tensor]:
        """What of the memory outlives episodes; before the first of them, what an evaluator noted with the weights."""
        if self.agent.recurrent_state is None:
            return {}
        if self.memory is None:
            return {name: self.flat.buffer(note).clone() for name, note in self._persistent_buffers().items()} | dict(
                self._persistent
            )
        return {name: self.memory[name].clone() for name in self.agent.recurrent_state.persistent}

    def save_persistent(self) -> None:
        """Write what outlives episodes into the network, where it goes with the weights."""
        kept = self.persistent()
        self.flat.set_buffers({note: kept[name] for name, note in self._persistent_buffers().items()})

    def _persistent_buffers(self) -> dict[str, str]:
        """Which buffer of the network is for what of the memory."""
        kept = () if self.agent.recurrent_state is None else self.agent.recurrent_state.persistent
        return {name: note for name in kept if (note := f"kept.{name}") in self.agent.eval_buffers}

    @torch.inference_mode()
    def act(
        self, obs: Obs, arm: ExplorationParams, with_priority_inputs: bool = False
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Actions [N] and extra columns, for observations {leaf: [N, ...]}; `hinted` asks an agent that appraises its
        actions for what priorities are computed from."""
        tensors = {name: aligned_tensor(leaf).to(self.device) for name, leaf in obs.items()}
        if self.memory is None and self.agent.recurrent_state is not None:
            self.begin(len(arm.epsilon))
        decision = self.agent.act(self.flat.net, tensors, self.memory, arm.to(self.device), self.rng)
        self.memory, extras = decision.memory, decision.extras
        if with_priority_inputs and self.agent.evaluate_actions is not None:
            extras = extras | self.agent.evaluate_actions(self.flat.net, tensors, decision.action)
        return decision.action.cpu().numpy(), {name: x.cpu().numpy() for name, x in extras.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"version": self.version, "weights": self.flat.state(), "rng": self.rng.get_state(),
                "memory": dict(self.persistent())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.load(state["weights"], state["version"])
        restore_rng(self.rng, state["rng"])
        self.memory, self._persistent = None, dict(state.get("memory", {}))


