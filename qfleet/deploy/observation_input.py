"""Inputs of an exported policy: one per observation leaf, as the environment returns it, and its conversion.

Shapes: N lanes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from qfleet.core.env import OBS_PREFIX, EnvSpec, Leaf
from qfleet.deploy.value_info import ValueInfo
from qfleet.envs.images import image_layout
from qfleet.envs.leaf_reader import LeafReader
from qfleet.envs.spaces import ROOT, SpaceAdapter

DTYPES = {"float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool"}
"""Types that inputs and outputs can have; others are replaced by those that the network reads."""

WIDEST = 1000
"""Bound of the integers that `sample` draws."""


class ObservationInput:
    """One leaf: its `ValueInfo`, the conversion of the environment's arrays in the graph, and the same outside of it.

    Images that are stacked or resized are an input as the network sees them, and so are all leaves of an environment
    without spaces of its own (Atari).
    """

    def __init__(self, name: str, leaf: Leaf, reader: LeafReader | None, space: spaces.Space[Any] | None) -> None:
        self.leaf_name, self.leaf = name, leaf
        self._space, self._reader = (None, None) if _is_prepared(leaf, reader) else (space, reader)
        shape, dtype = leaf.shape, leaf.dtype
        if self._space is not None:
            assert self._space.shape is not None and self._space.dtype is not None
            shape, dtype = self._space.shape, self._space.dtype.name
        self.info = ValueInfo(name if name == ROOT else f"{OBS_PREFIX}{name}", shape,
                         dtype if dtype in DTYPES else leaf.dtype, meaning=self._meaning())

    def convert(self, x: torch.Tensor) -> torch.Tensor:
        """The leaf [N, ...] as the network reads it, in operations that can be exported."""
        if self._space is None:
            return x
        if self.leaf.kind == "image":
            return self._image(x)
        if self.leaf.kind == "category":
            start = torch.from_numpy(np.reshape(getattr(self._space, "start", 0), (-1,)).astype(np.int64))
            return (x.to(torch.int64).reshape(-1, *self.leaf.shape) - start).to(torch.int32)
        return x.to(torch.float32).reshape(-1, *self.leaf.shape)

    def _image(self, x: torch.Tensor) -> torch.Tensor:
        assert self._space is not None
        layout = image_layout(self._space)
        assert layout is not None
        if layout.low:
            x = x.to(torch.int64) - layout.low
        x = x.to(getattr(torch, self.leaf.dtype))
        if len(self.info.shape) == 2:
            return x.unsqueeze(1)
        return x if layout.first else x.permute(0, 3, 1, 2)

    def encode(self, x: np.ndarray) -> torch.Tensor:
        """`convert` as the environment's lanes do it, one observation after another."""
        out = np.empty((len(x), *self.leaf.shape), self.leaf.dtype)
        for lane, raw in enumerate(x):
            out[lane] = raw if self._reader is None else self._reader.convert(raw)
        return torch.from_numpy(out)

    def sample(self, rng: np.random.Generator, lanes: int) -> np.ndarray:
        """Random observations within the space, [N, ...]."""
        low, high = self._bounds()
        shape, dtype = (lanes, *self.info.shape), np.dtype(self.info.dtype)
        if dtype.kind == "f":
            return np.clip(rng.normal(size=shape), low, high).astype(dtype)
        least = np.maximum(low, -WIDEST)
        return rng.integers(least, np.minimum(high, least + WIDEST), shape, endpoint=True).astype(dtype)

    def _bounds(self) -> tuple[Any, Any]:
        match self._space:
            case spaces.Box(low=low, high=high):
                return (low, high) if low.dtype.kind == "f" else (low.astype(np.int64), high.astype(np.int64))
            case spaces.Discrete(start=start, n=n):
                return start, start + n - 1
            case spaces.MultiDiscrete(start=start, nvec=nvec):
                return start.astype(np.int64), start.astype(np.int64) + nvec.astype(np.int64) - 1
            case spaces.MultiBinary():
                return 0, 1
        if self.leaf.kind == "category":
            return 0, np.array(self.leaf.sizes) - 1
        return (0, 255) if self.leaf.dtype == "uint8" else (-np.inf, np.inf)

    def _meaning(self) -> str:
        if self._space is None and self.leaf.kind == "image":
            stacked = "" if self.leaf.stack == 1 else (
                f", {self.leaf.stack} frames stacked on the first axis, newest last, zeros before the first one of an "
                "episode")
            return f"images as the agent sees them after preprocessing{stacked}"
        return f"observation, as {describe(self._space) if self._space is not None else 'the agent sees it'}"


def describe(space: spaces.Space[Any]) -> str:
    """A space on one line; bounds of many numbers are shortened."""
    return " ".join(str(space).split())


def observation_inputs(spec: EnvSpec, adapter: SpaceAdapter | None) -> list[ObservationInput]:
    """Inputs for all leaves, in the order of the spec."""
    readers = {} if adapter is None else {reader.name: reader for reader in adapter.encoder.readers}
    found = []
    for name, leaf in spec.observation.items():
        reader, space = readers.get(name), None
        if adapter is not None and reader is not None:
            space = reader.extract(adapter.observation)
        found.append(ObservationInput(name, leaf, reader, space))
    return found


def _is_prepared(leaf: Leaf, reader: LeafReader | None) -> bool:
    """True if the conversion of the environment's arrays is not a function of one array: it stays outside."""
    return reader is None or leaf.stack > 1 or reader.resized
