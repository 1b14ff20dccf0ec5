"""Windows, chunks and samples, and the protocols of a replay buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from qfleet.core.env import OBS_PREFIX


@dataclass(frozen=True)
class Window:
    """Rows of one training item.

    A window with burn-in or several trained positions lies within one episode. Rows before the
    first and after the final row of the episode are zeros with `last = True`; the first trained row
    is real and not final.

    Attributes:
        past: Burn-in rows, which only warm up a recurrent state.
        unroll: Trained rows.
        future: Look-ahead rows: n of n-step returns.
        stride: Distance between the starts of consecutive windows.

    Examples:
        >>> Window(future=3).length
        4
        >>> Window(past=40, unroll=80, future=5, stride=40).within_episode
        True
    """

    past: int = 0
    unroll: int = 1
    future: int = 1
    stride: int = 1

    @property
    def length(self) -> int:
        """Number of rows."""
        return self.past + self.unroll + self.future

    @property
    def within_episode(self) -> bool:
        """True if windows may not cross episode boundaries."""
        return self.unroll > 1 or self.past > 0


@dataclass(frozen=True)
class Chunk:
    """Self-contained sequence of consecutive rows of one lane, as sent by an actor.

    The first `stack - 1` rows are context for stacking; S window starts follow, then the look-ahead rows. A short
    chunk is zero-padded to R rows; padded starts are not valid.

    Attributes:
        columns: Arrays [R, ...] by name: `action`, `reward`, `discount`, `last`, one `obs.<leaf>` per leaf (newest
            frames only), and the agent's extras. An agent's stored states are [S, M, ...]: for each start, at the M
            state rows of its window.
        valid: Bool [S]: starts at which a window may begin.
    """

    columns: dict[str, np.ndarray]
    valid: np.ndarray

    @property
    def last(self) -> np.ndarray:
        """Bool [R]: True for final rows and padding."""
        return self.columns["last"]


@dataclass(frozen=True)
class Sample:
    """A batch of windows.

    Attributes:
        keys: Identify the items [B] when priorities are updated.
        weight: Importance weights [B], normalised to a maximum of 1. Only the learner applies them.
        rows: Columns [B, T, ...] by name, or [B, M, ...] for an agent's stored states. Frames of observation leaves
            are stacked.
        max_weight: Largest weight before normalisation. It makes batches from several replays comparable.
    """

    keys: np.ndarray
    weight: torch.Tensor
    rows: dict[str, torch.Tensor]
    max_weight: float = 1.0

    @property
    def leaves(self) -> dict[str, torch.Tensor]:
        """Observations [B, T, ...] of all rows, by leaf."""
        return {name[len(OBS_PREFIX):]: value for name, value in self.rows.items() if name.startswith(OBS_PREFIX)}

    def obs(self, row: int | torch.Tensor) -> dict[str, torch.Tensor]:
        """Observations of one row of the windows.

        Args:
            row: Index of the row, or one index per item [B].

        Returns:
            Tensors [B, ...] by leaf.
        """
        leaves = self.leaves
        if isinstance(row, int):
            return {name: value[:, row] for name, value in leaves.items()}
        # One index copies whole rows; on a CPU, two indices copy element by element.
        length = next(iter(leaves.values())).shape[1]
        at = torch.arange(0, len(row) * length, length, device=row.device) + row
        return {name: value.flatten(0, 1).index_select(0, at) for name, value in leaves.items()}


class ExperienceSink(Protocol):
    """Destination of an actor's chunks."""

    def add(self, chunk: Chunk, priority: np.ndarray | None = None) -> int | None:
        """Store a chunk.

        Args:
            chunk: Rows of one lane.
            priority: Priorities of its starts [S]; None = the largest seen so far.

        Returns:
            Serial number of the chunk; None if the actor must wait and try again.
        """


class Replay(ExperienceSink, Protocol):
    """Replay buffer: stores chunks, samples batches of windows and updates their priorities."""

    def sample(self, n: int) -> Sample | None:
        """Sample a batch.

        Args:
            n: Number of windows.

        Returns:
            The batch; None if the learner must wait.
        """

    def update(self, keys: np.ndarray, priority: np.ndarray) -> None:
        """Set new priorities of sampled windows.

        Args:
            keys: Keys of the windows [B], from `Sample.keys`.
            priority: New priorities [B].
        """


@dataclass(frozen=True)
class Segment:
    """Immutable piece of a saved replay.

    Equal names within a run mean equal bytes, so files can be hard-linked. `source` is an existing
    file with the same bytes on the same disk, which may be linked too.
    """

    name: str
    blocks: Callable[[], Iterable[bytes]]
    source: Path | None = None
