"""Policy as a function of named tensors: observations and recurrent state to actions, values and the next state."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from qfleet.core.agent import LAST_REWARD, Agent, Decision
from qfleet.core.env import EnvSpec
from qfleet.core.errors import UserError
from qfleet.deploy.action_output import ActionOutput
from qfleet.deploy.observation_input import observation_inputs
from qfleet.deploy.value_info import Arrays, ValueInfo
from qfleet.envs.spaces import SpaceAdapter

NEXT = "next."
"""Prefix of the outputs that are inputs of the next step."""

MEANINGS = {"state.action": "previous action plus 1, as an index; 0 at the start of an episode",
            LAST_REWARD: "reward of the last step (its sign with env.clip_rewards), not normalised; set by the caller"}


class PolicyGraph(nn.Module):
    """Greedy policy of an agent, on the CPU and without noise.

    Inputs are the observation leaves (`obs`, or `obs.NAME` for several), then the recurrent state. Outputs are
    `action`, the values `q` of discrete actions, then the next recurrent state (`next.NAME`).
    """

    def __init__(self, agent: Agent, net: nn.Module, spec: EnvSpec, adapter: SpaceAdapter | None,
                 persistent: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        if agent.greedy is None:
            raise UserError("this agent cannot be exported: its algorithm defines no `greedy` (see "
                            "qfleet.core.agent.Agent); --format safetensors stores its weights")
        self.greedy, self.recurrent, self.state_names = agent.greedy, agent.recurrent_state, agent.greedy_state
        self.net, self.actions, self.persistent = net, ActionOutput(adapter), dict(persistent)
        self.leaves = observation_inputs(spec, adapter)
        self.inputs = [*(leaf.info for leaf in self.leaves), *self._state_infos()]
        with torch.no_grad():
            decision = self._decide({leaf.leaf_name: leaf.convert(torch.from_numpy(self.sample(2)[leaf.info.name]))
                                     for leaf in self.leaves}, self.initial_state(2))
        self.outputs = [self.actions.info, *self._other_infos(decision)]

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = dict(zip([info.name for info in self.inputs], tensors, strict=True))
        obs = {leaf.leaf_name: leaf.convert(given[leaf.info.name]) for leaf in self.leaves}
        decision = self._decide(obs, given)
        return (self.actions(decision.action), *self._others(decision).values())

    def reference(self, inputs: Arrays) -> dict[str, np.ndarray]:
        """The outputs, computed as the actors do: observations and actions are converted one by one in NumPy."""
        obs = {leaf.leaf_name: leaf.encode(inputs[leaf.info.name]) for leaf in self.leaves}
        with torch.no_grad():
            decision = self._decide(obs, {name: torch.from_numpy(inputs[name]) for name in self.state_names})
        others = {name: value.numpy() for name, value in self._others(decision).items()}
        return {self.actions.info.name: self.actions.decode(decision.action), **others}

    def sample(self, lanes: int, seed: int = 0) -> dict[str, np.ndarray]:
        """Random inputs for this many lanes, with the recurrent state at the start of an episode."""
        rng = np.random.default_rng(seed)
        state = {name: value.numpy() for name, value in self.initial_state(lanes).items()}
        return {**{leaf.info.name: leaf.sample(rng, lanes) for leaf in self.leaves}, **state}

    def initial_state(self, lanes: int) -> dict[str, torch.Tensor]:
        """Recurrent state before the first episode."""
        if self.recurrent is None:
            return {}
        memory = {**self.recurrent.initial(lanes, torch.device("cpu")), **self.persistent}
        return {name: memory[name] for name in self.state_names}

    def episodic_state(self) -> list[str]:
        """Names of the recurrent state that is set to zero when an episode ends."""
        if self.recurrent is None or not self.state_names:
            return []
        filled = {name: torch.ones_like(value)
                  for name, value in self.recurrent.initial(1, torch.device("cpu")).items()}
        after = self.recurrent.reset(filled, torch.ones(1, dtype=torch.bool))
        return [name for name in self.state_names if not after[name].any()]

    def _decide(self, obs: dict[str, torch.Tensor], state: Mapping[str, torch.Tensor]) -> Decision:
        return self.greedy(self.net, obs, {name: state[name] for name in self.state_names})

    def _others(self, decision: Decision) -> dict[str, torch.Tensor]:
        """All outputs but the action."""
        values = {"q": decision.extras["q"]} if "q" in decision.extras else {}
        state = decision.memory or {}
        return values | {NEXT + name: state[name] for name in self.state_names if name in state}

    def _state_infos(self) -> list[ValueInfo]:
        one, two = (self.initial_state(lanes) for lanes in (1, 2))
        return [_info(name, value, one[name].shape != value.shape, MEANINGS.get(name, ""))
                for name, value in two.items()]

    def _other_infos(self, decision: Decision) -> list[ValueInfo]:
        batched = {NEXT + info.name: info.batched for info in self.inputs}
        return [_info(name, value, batched.get(name, True), "values of the agent's actions" if name == "q" else "")
                for name, value in self._others(decision).items()]


def _info(name: str, value: torch.Tensor, batched: bool, meaning: str) -> ValueInfo:
    return ValueInfo(name, tuple(value.shape[int(batched):]), str(value.dtype).removeprefix("torch."), batched, meaning)
