"""Output of an exported policy: actions as the environment takes them. Shapes: N lanes, A actions of the agent."""

from __future__ import annotations

import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from qfleet.deploy.observation_input import DTYPES, describe
from qfleet.deploy.value_info import ValueInfo
from qfleet.envs.spaces import SpaceAdapter


class ActionOutput(nn.Module):
    """Decodes the agent's actions: indices by a table, numbers within ±1 by rescaling to the bounds of the Box."""

    def __init__(self, adapter: SpaceAdapter | None) -> None:
        super().__init__()
        self.adapter = adapter
        space = None if adapter is None else adapter.action
        if isinstance(space, spaces.Box):
            self.info = ValueInfo("action", space.shape, space.dtype.name, meaning=f"action of {describe(space)}")
            exact = torch.float64 if space.dtype == np.float64 else torch.float32
            low, high = (torch.from_numpy(bound.astype(np.float64)) for bound in (space.low, space.high))
            parts = {"scale": (high - low) / 2, "centre": (high + low) / 2, "low": low, "high": high}
            for name, value in parts.items():
                self.register_buffer(name, value.to(exact))
        elif adapter is None or (isinstance(space, spaces.Discrete) and space.start == 0):
            self.info = ValueInfo("action", (), "int64", meaning=f"action, 0 to n - 1 of {space or 'the game'}")
        else:
            table = np.stack([np.asarray(adapter.actions.decode(index)) for index in range(adapter.actions.n)])
            table = table if table.dtype.name in DTYPES else table.astype(np.int64)
            meaning = f"action of {describe(adapter.action)}"
            self.info = ValueInfo("action", table.shape[1:], table.dtype.name, meaning=meaning)
            self.register_buffer("table", torch.from_numpy(table))

    def forward(self, action: torch.Tensor) -> torch.Tensor:
        if "table" in self._buffers:
            return self.get_buffer("table")[action]
        if "scale" not in self._buffers:
            return action.to(torch.int64)
        scale, centre, low, high = (self.get_buffer(name) for name in ("scale", "centre", "low", "high"))
        scaled = torch.minimum(torch.maximum(centre + scale * action.to(scale.dtype), low), high)
        found: torch.Tensor = scaled.to(getattr(torch, self.info.dtype))
        return found

    def decode(self, action: torch.Tensor) -> np.ndarray:
        """The same, as the environment's lanes do it, one action after another."""
        if self.adapter is None:
            return action.numpy().astype(np.int64)
        given = action.tolist() if self.adapter.actions.box is None else list(action.numpy())
        return np.stack([np.asarray(self.adapter.actions.decode(each), self.info.dtype) for each in given])
