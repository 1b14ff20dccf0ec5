"""What accelerators need of a policy, of flat parameters and of an optimizer, whose packages use accelerators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from qfleet.core.agent import Agent, ExplorationParams, Memory, ParamGroup
from qfleet.core.env import Obs
from qfleet.core.weights import WeightSource


class GroupedSlice(Protocol):
    """A slice of the parameter vector with its own `ParamGroup`."""

    @property
    def group(self) -> ParamGroup: ...


class FlatParams(Protocol):
    """A network's parameters as one vector: `master` for the optimizer, `data` for the network."""

    @property
    def net(self) -> nn.Module: ...
    @property
    def data(self) -> torch.Tensor: ...
    @property
    def master(self) -> torch.Tensor: ...
    @property
    def param_slices(self) -> Sequence[GroupedSlice]: ...
    @property
    def bf16_target(self) -> tuple[torch.Tensor, torch.Tensor] | None: ...
    def gather(self, grads: Sequence[torch.Tensor | None]) -> torch.Tensor: ...
    def copy_to_network(self) -> None: ...
    def set_buffers(self, buffers: Mapping[str, torch.Tensor]) -> None: ...
    def buffer(self, name: str) -> torch.Tensor: ...


class DeviceOptimizer(Protocol):
    """An optimizer that steps without the host; see `Optimizer.step_if`."""

    def prepare(self) -> None: ...
    def step_if(self, ok: torch.Tensor, gradient: torch.Tensor, norm: torch.Tensor,
                bf16_target: tuple[torch.Tensor, torch.Tensor] | None = None) -> bool: ...


class ActingPolicy(Protocol):
    """What an actor uses to choose actions: a `Policy`, or an accelerated version of it."""

    def refresh(self, weights: WeightSource) -> int | None: ...
    def observe(self, reward: np.ndarray, over: np.ndarray) -> None: ...
    def act(
        self, obs: Obs, params: ExplorationParams, with_priority_inputs: bool = False
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]: ...


class EagerPolicy(ActingPolicy, Protocol):
    """A `Policy`, of which an accelerated version can be made; those made are kept in `graph_policies`."""

    graph_policies: dict[tuple[int, tuple[str, ...]], Any]

    @property
    def agent(self) -> Agent: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def flat(self) -> FlatParams: ...
    @property
    def rng(self) -> torch.Generator: ...
    @property
    def version(self) -> int: ...
    def persistent(self) -> Mapping[str, torch.Tensor]: ...
    def share_memory(self, memory: Memory) -> None: ...
