"""Environments as the rest of the package sees them: observation leaves, actions, step results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

Obs = dict[str, np.ndarray]
"""Host observations: leaf name -> [N, ...]."""


OBS_PREFIX = "obs."
"""Prefix of the columns that hold observation leaves: leaf `image` travels as column `obs.image`."""


@dataclass(frozen=True)
class Leaf:
    """One array of an observation.

    An image leaf is channel-first, `(stack * C, H, W)`: `stack` consecutive frames of `C` channels on the
    first axis, newest last, zeros before the episode's first frame. Replay stores each frame once.
    A category leaf holds integers; `sizes` says how many values each entry can take (one-hot in the network).
    """

    shape: tuple[int, ...]
    dtype: str
    kind: Literal["image", "vector", "category"]
    sizes: tuple[int, ...] = ()
    stack: int = 1

    @property
    def frame_shape(self) -> tuple[int, ...]:
        """Shape of what is new in every step: the newest frame of a stack, or the whole leaf."""
        if self.stack == 1:
            return self.shape
        return (self.shape[0] // self.stack, *self.shape[1:])


@dataclass(frozen=True)
class Box:
    """Continuous actions. An agent's are within ±1; the environment's lie between `low` and `high` (flat)."""

    shape: tuple[int, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]

    @property
    def size(self) -> int:
        return len(self.low)


@dataclass(frozen=True)
class EnvSpec:
    """What an agent must know of its environment. Equal specs mean interchangeable environments.

    Actions are the numbers 0 ... `actions` − 1; or, if `box` is given, arrays of its shape, and `actions` is 0.
    """

    id: str
    observation: Mapping[str, Leaf]
    num_actions: int
    frames_per_step: int = 1
    box: Box | None = None

    @property
    def stack(self) -> int:
        """The deepest frame stack among the leaves."""
        return max(leaf.stack for leaf in self.observation.values())

    @property
    def action_spec(self) -> tuple[tuple[int, ...], str]:
        """Shape and dtype of one action."""
        return ((), "int32") if self.box is None else (self.box.shape, "float32")

    @property
    def action_text(self) -> str:
        """What there is to choose from, in words."""
        if self.box is None:
            return f"{self.num_actions} actions"
        low, high = min(self.box.low), max(self.box.high)
        return f"actions of {'×'.join(map(str, self.box.shape)) or 'one'} numbers within {low:g} to {high:g}"

    @property
    def observation_text(self) -> str:
        """What is observed, in words: `obs 4×84×84 uint8`."""
        return ", ".join(f"{name} {'×'.join(map(str, leaf.shape)) or 'scalar'} {leaf.dtype}"
                         + (f" below {'×'.join(map(str, leaf.sizes))}" if leaf.sizes else "")
                         for name, leaf in self.observation.items())

    def to_json(self) -> dict[str, Any]:
        leaves = {name: vars(leaf) | {"shape": list(leaf.shape), "sizes": list(leaf.sizes)}
                  for name, leaf in self.observation.items()}
        box = {} if self.box is None else {"box": {name: list(value) for name, value in vars(self.box).items()}}
        return {"id": self.id, "observation": leaves, "actions": self.num_actions,
                "frames_per_step": self.frames_per_step, **box}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> EnvSpec:
        leaves = {name: Leaf(**{**leaf, "shape": tuple(leaf["shape"]), "sizes": tuple(leaf["sizes"])})
                  for name, leaf in data["observation"].items()}
        box = Box(**{name: tuple(value) for name, value in data["box"].items()}) if "box" in data else None
        return EnvSpec(data["id"], leaves, data["actions"], data["frames_per_step"], box)


@dataclass(frozen=True)
class StepResult:
    """What one vector step brought, lane by lane.

    `reward` (as trained on) and `discount` (0 = terminated) belong to the step just taken; `score` is the
    unclipped reward. `obs` is where the step led; `last` says that it ends the episode. The step after a
    `last` ignores its action and brings the next episode's first observation, with zero reward, discount
    and score. `cut` says that the episode was broken off without an outcome (an environment was rebuilt):
    the observation before is its final row, `obs` begins another episode, and no score may be counted.
    """

    obs: Obs
    reward: np.ndarray
    discount: np.ndarray
    last: np.ndarray
    raw_reward: np.ndarray
    aborted: np.ndarray


class VectorEnv(Protocol):
    """N lanes of one environment, stepped together: `send` starts a step, `recv` ends it.

    What was handed out stays as it is until the `recv` after the next one: it is stored while the lanes compute.
    """

    spec: EnvSpec
    lanes: int

    def reset(self, seeds: Sequence[int]) -> Obs: ...
    def send(self, actions: np.ndarray) -> None: ...
    def recv(self) -> StepResult: ...
    def render(self) -> np.ndarray | None:
        """The picture of lane 0, [H, W, 3] uint8, if the environment was made to be seen."""

    def faults(self) -> int:
        """How many episodes were lost to environments that failed and were rebuilt."""

    def close(self) -> None: ...
