"""Environment interface: observation leaves, actions and step results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

Obs = dict[str, np.ndarray]
"""Observations in host memory: leaf name -> [N, ...]."""


OBS_PREFIX = "obs."
"""Column prefix of observation leaves: leaf `image` is stored in column `obs.image`."""


@dataclass(frozen=True)
class Leaf:
    """One array of an observation.

    An image leaf is channel-first, `(stack * C, H, W)`: `stack` consecutive frames of `C` channels
    on the first axis, newest last, zeros before the episode's first frame. Replay stores each frame
    once. The network reads its values divided by `divisor`, or with `symbols` one-hot.

    Attributes:
        shape: Shape, without a batch axis.
        dtype: Dtype of the stored values.
        kind: `image`, `vector` or `category`.
        sizes: Number of values of each entry of a category leaf, which holds integers (one-hot in the network).
        stack: Frames of an image.
        largest: Largest value of an image; None = that of its dtype.
        symbols: Number of values of an image of symbols: the network reads one plane per value, higher ones count as
            the last. 0 = no symbols.
    """

    shape: tuple[int, ...]
    dtype: str
    kind: Literal["image", "vector", "category"]
    sizes: tuple[int, ...] = ()
    stack: int = 1
    largest: float | None = None
    symbols: int = 0

    @property
    def divisor(self) -> float:
        """Number by which the values of an image are divided: `largest`, or without it 255 for bytes, else 1."""
        return self.largest or (255.0 if self.dtype == "uint8" else 1.0)

    @property
    def frame_shape(self) -> tuple[int, ...]:
        """Shape of the part that is new in every step: the newest frame of a stack, or the whole leaf."""
        if self.stack == 1:
            return self.shape
        return (self.shape[0] // self.stack, *self.shape[1:])


@dataclass(frozen=True)
class Box:
    """Continuous action space. The agent's actions lie in [-1, 1]; `low` and `high` (flat) bound the environment's."""

    shape: tuple[int, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]

    @property
    def size(self) -> int:
        return len(self.low)


@dataclass(frozen=True)
class EnvSpec:
    """Observation and action spaces of an environment. Equal specs mean interchangeable environments.

    Attributes:
        id: Environment id.
        observation: Arrays of the observation, by name.
        num_actions: Discrete actions are 0 ... `num_actions` − 1; 0 for continuous actions.
        frames_per_step: Emulator frames per environment step.
        box: Continuous action space; None for discrete actions.
        spaces: The environment's own spaces in JSON (`envs.stored_spaces`); None if unknown or if the agent's are the
            environment's (Atari).
    """

    id: str
    observation: Mapping[str, Leaf]
    num_actions: int
    frames_per_step: int = 1
    box: Box | None = None
    spaces: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)

    @property
    def stack(self) -> int:
        """Largest frame stack of all leaves."""
        return max(leaf.stack for leaf in self.observation.values())

    @property
    def action_spec(self) -> tuple[tuple[int, ...], str]:
        """Shape and dtype of one action."""
        return ((), "int32") if self.box is None else (self.box.shape, "float32")

    @property
    def action_text(self) -> str:
        """Action space as text: `4 actions`."""
        if self.box is None:
            return f"{self.num_actions} actions"
        low, high = min(self.box.low), max(self.box.high)
        return f"actions of {'×'.join(map(str, self.box.shape)) or 'one'} numbers within {low:g} to {high:g}"

    @property
    def observation_text(self) -> str:
        """Observation space as text: `obs 4×84×84 uint8`."""
        return ", ".join(f"{name} {'×'.join(map(str, leaf.shape)) or 'scalar'} {leaf.dtype}"
                         + (f" below {'×'.join(map(str, leaf.sizes))}" if leaf.sizes else "")
                         + (f" of {leaf.symbols} symbols" if leaf.symbols else "")
                         for name, leaf in self.observation.items())

    def to_json(self) -> dict[str, Any]:
        leaves = {name: vars(leaf) | {"shape": list(leaf.shape), "sizes": list(leaf.sizes)}
                  for name, leaf in self.observation.items()}
        box = {} if self.box is None else {"box": {name: list(value) for name, value in vars(self.box).items()}}
        spaces = {} if self.spaces is None else {"spaces": self.spaces}
        return {"id": self.id, "observation": leaves, "actions": self.num_actions,
                "frames_per_step": self.frames_per_step, **box, **spaces}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> EnvSpec:
        leaves = {name: Leaf(**{**leaf, "shape": tuple(leaf["shape"]), "sizes": tuple(leaf["sizes"])})
                  for name, leaf in data["observation"].items()}
        box = Box(**{name: tuple(value) for name, value in data["box"].items()}) if "box" in data else None
        return EnvSpec(data["id"], leaves, data["actions"], data["frames_per_step"], box, data.get("spaces"))


@dataclass(frozen=True)
class StepResult:
    """Result of one vector step, per lane.

    The step after a `last` ignores its action and returns the first observation of the next episode,
    with zero reward, discount and raw reward.

    Attributes:
        obs: Next observations.
        reward: Rewards of the step just taken, as trained on.
        discount: 0 where the step terminated the episode, else 1.
        last: True at the end of an episode.
        raw_reward: Unclipped rewards.
        aborted: True for episodes that ended without a result because the environment was rebuilt. The previous
            observation is the final row, `obs` begins another episode, and the return is not counted.
        info: The episode's `env.info_metrics`, by lane, where `last` is true.
        final_info: `info` of the episode's final step, by lane, as far as it is known.
    """

    obs: Obs
    reward: np.ndarray
    discount: np.ndarray
    last: np.ndarray
    raw_reward: np.ndarray
    aborted: np.ndarray
    info: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    final_info: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)


class VectorEnv(Protocol):
    """N lanes of one environment, stepped together: `send` starts a step, `recv` ends it.

    Returned arrays stay unchanged until the `recv` after the next one: they are stored while the
    lanes compute.

    Attributes:
        spec: Observations and actions.
        lanes: Number of environments.
    """

    spec: EnvSpec
    lanes: int

    def reset(self, seeds: Sequence[int]) -> Obs:
        """Start an episode in every lane.

        Args:
            seeds: One seed per lane.

        Returns:
            First observations.
        """

    def send(self, actions: np.ndarray) -> None:
        """Start a step.

        Args:
            actions: One action per lane.
        """

    def recv(self) -> StepResult:
        """Wait for the end of the step.

        Returns:
            Its result.
        """

    def render(self) -> np.ndarray | None:
        """Render lane 0.

        Returns:
            Image [H, W, 3] uint8; None if the environment does not render.
        """

    def faults(self) -> int:
        """Count environments that failed.

        Returns:
            Number of episodes lost because an environment failed and was rebuilt.
        """

    def close(self) -> None:
        """Close all environments."""
