"""The nouns everybody shares: what an environment offers, what a step brings, what a learner samples.

Shapes: N lanes of one vector environment, B windows of a batch, T rows of a window, R rows of a chunk,
S window starts of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch

Obs = dict[str, np.ndarray]
"""Host observations: leaf name -> [N, ...]."""

OBS_PREFIX = "obs."
"""Prefix of the columns that hold observation leaves: leaf `image` travels as column `obs.image`."""


class UserError(Exception):
    """A mistake of the user's: the message names the value and the remedy; shown without a traceback, exit 2."""


class EnvFault(Exception):
    """The environment failed beyond repair (it raised again and again, hung, or returned NaN); exit 1."""


class BadOutput(EnvFault):
    """The environment returned NaN, infinity, or what does not fit its space: no restart mends that; exit 1."""


class ProcessFault(Exception):
    """A process of a fleet died again and again; the text holds what it wrote the first time; exit 1."""


class RunLost(ProcessFault):
    """The directory of a run was deleted or replaced while the run wrote to it; exit 1."""


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


@dataclass(frozen=True)
class Window:
    """The rows that one training item spans: burn-in, trained positions, look-ahead (n), distance of starts.

    A window of several trained positions, or with burn-in, lies within one episode. Rows that an episode does not have,
    before its first and after its final one, are zeros with `last = True`; the first trained row is real and not final.
    """

    past: int = 0
    unroll: int = 1
    future: int = 1
    stride: int = 1

    @property
    def length(self) -> int:
        return self.past + self.unroll + self.future

    @property
    def within_episode(self) -> bool:
        """Whether windows keep within one episode."""
        return self.unroll > 1 or self.past > 0


@dataclass(frozen=True)
class Chunk:
    """A self-contained run of consecutive rows of one lane, as the actor ships it.

    `columns[name]` is [R, ...]: `action`, `reward`, `discount`, `last`, one `obs.<leaf>` per leaf (newest
    frames only), and the agent's extras. The first `stack - 1` rows are context for stacking; S window starts
    follow, then the look-ahead rows. `valid` [S] says from which starts a window may begin. A short chunk is
    zero-padded to R rows, its starts not valid. An agent's states are [S, M, ...]: of each start, at M marks of its
    window only.
    """

    columns: dict[str, np.ndarray]
    valid: np.ndarray

    @property
    def last(self) -> np.ndarray:
        """Bool [R]: final rows and padding."""
        return self.columns["last"]


@dataclass(frozen=True)
class Sample:
    """A batch of windows.

    `rows[name]` is [B, T, ...], or [B, M, ...] for an agent's states; observation leaves are stacked again. `weight`
    [B] are the importance weights, applied by the Learner and nowhere else; the largest is 1, and `peak` is what it was
    before: with it, batches of several replays can be weighed against each other. `keys` [B] come back with the new
    priorities.
    """

    keys: np.ndarray
    weight: torch.Tensor
    rows: dict[str, torch.Tensor]
    max_weight: float = 1.0

    @property
    def leaves(self) -> dict[str, torch.Tensor]:
        """Observations [B, T, ...] of all rows."""
        return {name[len(OBS_PREFIX):]: value for name, value in self.rows.items() if name.startswith(OBS_PREFIX)}

    def obs(self, row: int | torch.Tensor) -> dict[str, torch.Tensor]:
        """Observations [B, ...] of one row of the window, or of a row [B] chosen per item."""
        leaves = self.leaves
        if isinstance(row, int):
            return {name: value[:, row] for name, value in leaves.items()}
        if row.is_cuda:
            item = torch.arange(len(row), device=row.device)
            return {name: value[item, row] for name, value in leaves.items()}
        # With one index a CPU copies whole rows, with two number by number.
        length = next(iter(leaves.values())).shape[1]
        at = torch.arange(0, len(row) * length, length) + row
        return {name: value.flatten(0, 1).index_select(0, at) for name, value in leaves.items()}


class ExperienceSink(Protocol):
    """Where actors put what they saw. `None` means: wait. `tick` counts environment steps when they are taken."""

    @property
    def steps(self) -> int:
        """Environment steps of the whole run so far, as far as is known here."""

    def count_steps(self, steps: int) -> None: ...
    def add(self, chunk: Chunk, priority: np.ndarray | None = None) -> int | None: ...


class Replay(ExperienceSink, Protocol):
    """Where experience rests, and learners take it from."""

    def sample(self, n: int) -> Sample | None: ...
    def update(self, keys: np.ndarray, priority: np.ndarray) -> None: ...


class WeightSource(Protocol):
    """What those who act read of a learner's weights. A version is the number of updates behind it."""

    def fetch(self, newer_than: int) -> tuple[int, dict[str, torch.Tensor]] | None: ...


class WeightStore(WeightSource, Protocol):
    """The mailbox between a learner and those who act."""

    @property
    def has_reader(self) -> bool:
        """Whether somebody would read newer weights: a copy that nobody takes need not be made."""

    def publish(self, state: dict[str, torch.Tensor], version: int) -> None: ...


class Metrics(Protocol):
    """Takes figures by tag. Means are taken over a log period, counters are kept as they are."""

    def write(self, values: Mapping[str, float]) -> None: ...
    def count(self, name: str, by: int = 1) -> None: ...
    def episode(self, lane: int, ret: float, length: int) -> None: ...


@dataclass(frozen=True)
class Segment:
    """An immutable piece of saved replay: equal names in one run mean equal bytes, so files can be hard-linked.

    `source` is a file on the same disk that holds those bytes already and may be linked, too.
    """

    name: str
    blocks: Callable[[], Iterable[bytes]]
    source: Path | None = None
