"""Policy: an agent's network that selects actions, for actors, evaluators and scripts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from qfleet.core.agent import Agent, ExplorationParams, Memory
from qfleet.core.compute import PRECISIONS, seeded_network, set_current_device
from qfleet.core.env import Obs
from qfleet.core.rng import restore_rng
from qfleet.core.weights import WeightSource
from qfleet.maths.aligned import aligned_tensor
from qfleet.optim.flat_params import Flat


class Policy:
    """Selects actions for N lanes with `act(obs, params)`, using the newest weights loaded.

    `version` is the number of updates behind those weights; -1 means the initial ones. For
    recurrent agents, `begin` starts episodes and `observe` reports the reward of a step and the
    ends of episodes.
    """

    def __init__(self, agent: Agent, seed: int, device: torch.device, precision: str = "fp32") -> None:
        self.agent, self.device = agent, device
        set_current_device(device)
        self.flat = Flat(seeded_network(agent, seed).to(device).requires_grad_(False).eval(), PRECISIONS[precision])
        self.rng = torch.Generator(device).manual_seed(seed)
        self.version = -1
        self.memory: Memory = None
        self._persistent: Mapping[str, torch.Tensor] = {}
        # Accelerated versions of this policy, by number of lanes and names of extra columns.
        self.graph_policies: dict[tuple[int, tuple[str, ...]], Any] = {}

    def refresh(self, weights: WeightSource) -> int | None:
        """Load newer weights if there are any; returns the number of updates by which they are newer."""
        newer = weights.fetch(self.version)
        if newer is None:
            return None
        lag = newer[0] - max(0, self.version)
        self.load(newer[1], newer[0])
        return lag

    def load(self, state: Mapping[str, torch.Tensor], version: int) -> None:
        self.flat.load(state, self.agent.eval_buffers)  # missing in checkpoints of 0.1
        self.version = version

    @torch.inference_mode()
    def begin(self, lanes: int) -> None:
        """Start an episode in every lane, with the initial recurrent state."""
        self.memory = self._initial_memory(lanes)

    def _initial_memory(self, lanes: int) -> Memory:
        if (recurrent := self.agent.recurrent_state) is None:
            return None
        persistent = {name: value.to(self.device) for name, value in self.persistent().items()}
        return recurrent.initial(lanes, self.device) | persistent

    def end_episodes(self) -> None:
        """Drop the recurrent state: the next action starts an episode in every lane."""
        self.memory = None

    @contextmanager
    def other_episodes(self) -> Iterator[None]:
        """While inside, the policy plays other episodes; afterwards it continues those that it interrupted."""
        memory = self.memory
        self.end_episodes()
        try:
            yield
        finally:
            self.memory = memory

    def share_memory(self, memory: Memory) -> None:
        """Use a recurrent state that an accelerated version of this policy updates in place."""
        self.memory = memory

    def observe(self, reward: np.ndarray, over: np.ndarray) -> None:
        """Feed the rewards [N] of the last step to the recurrent state; reset lanes [N] whose episode ended."""
        if (recurrent := self.agent.recurrent_state) is None:
            return
        with torch.inference_mode():
            self.memory = recurrent.observe(self.memory, aligned_tensor(reward).to(self.device))
            if over.any():
                self.memory = recurrent.reset(self.memory, torch.from_numpy(over).to(self.device))

    def persistent(self) -> Mapping[str, torch.Tensor]:
        """Recurrent state that survives episodes; before the first episode, that saved with the weights."""
        if self.agent.recurrent_state is None:
            return {}
        if self.memory is None:
            buffers = self._persistent_buffers()
            saved = {name: self.flat.buffer(buffer).clone() for name, buffer in buffers.items()}
            return saved | dict(self._persistent)
        return {name: self.memory[name].clone() for name in self.agent.recurrent_state.persistent}

    def save_persistent(self) -> None:
        """Write the persistent recurrent state to network buffers, which are saved with the weights."""
        persistent = self.persistent()
        self.flat.set_buffers({buffer: persistent[name] for name, buffer in self._persistent_buffers().items()})

    def _persistent_buffers(self) -> dict[str, str]:
        """Name of persistent state -> name of its network buffer."""
        names = () if self.agent.recurrent_state is None else self.agent.recurrent_state.persistent
        return {name: buffer for name in names if (buffer := f"kept.{name}") in self.agent.eval_buffers}

    @torch.inference_mode()
    def act(
        self, obs: Obs, params: ExplorationParams, with_priority_inputs: bool = False
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Actions [N] and extra columns for observations {leaf: [N, ...]}.

        `with_priority_inputs` adds the result of `Agent.evaluate_actions`, if the agent has it.
        """
        tensors = {name: aligned_tensor(leaf).to(self.device) for name, leaf in obs.items()}
        if self.memory is None and self.agent.recurrent_state is not None:
            self.begin(len(params.epsilon))
        decision = self.agent.act(self.flat.net, tensors, self.memory, params.to(self.device), self.rng)
        self.memory, extras = decision.memory, decision.extras
        if with_priority_inputs and self.agent.evaluate_actions is not None:
            extras = extras | self.agent.evaluate_actions(self.flat.net, tensors, decision.action)
        return decision.action.cpu().numpy(), {name: x.cpu().numpy() for name, x in extras.items()}

    @torch.inference_mode()
    def q_values(self, obs: Obs) -> np.ndarray | None:
        """Values [N, A] that the next greedy `act` compares, in units of the return; the policy does not change.

        None if the agent's actions have no values of their own.
        """
        if self.agent.q_values is None:
            return None
        tensors = {name: aligned_tensor(leaf).to(self.device) for name, leaf in obs.items()}
        lanes, rng = len(next(iter(tensors.values()))), torch.Generator(self.device)
        rng.set_state(self.rng.get_state())
        greedy = ExplorationParams(torch.zeros(lanes, device=self.device), network_noise=False)
        memory = self._initial_memory(lanes) if self.memory is None else self.memory
        decision = self.agent.act(self.flat.net, tensors, memory, greedy, rng)
        return self.agent.q_values(decision.extras).float().cpu().numpy()

    def state_dict(self) -> dict[str, Any]:
        return {"version": self.version, "weights": self.flat.state(), "rng": self.rng.get_state(),
                "memory": dict(self.persistent())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.load(state["weights"], state["version"])
        restore_rng(self.rng, state["rng"])
        self.memory, self._persistent = None, dict(state.get("memory", {}))


