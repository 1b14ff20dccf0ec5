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
    """Rows of one training item: burn-in (`past`), trained positions (`unroll`), look-ahead
    (`future`, n of n-step returns), and the distance between two window starts (`stride`).

    A window with burn-in or several trained positions lies within one episode. Rows before the
    first and after the final row of the episode are zeros with `last = True`; the first trained row
    is real and not final.
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
        """True if windows may not cross episode boundaries."""
        return self.unroll > 1 or self.past > 0


@dataclass(frozen=True)
class Chunk:
    """Self-contained sequence of consecutive rows of one lane, as sent by an actor.

    `columns[name]` is [R, ...]: `action`, `reward`, `discount`, `last`, one `obs.<leaf>` per leaf
    (newest frames only), and the agent's extras. The first `stack - 1` rows are context for
    stacking; S window starts follow, then the look-ahead rows. `valid` [S] marks the starts at
    which a window may begin. A short chunk is zero-padded to R rows; padded starts are not valid.
    An agent's stored states are [S, M, ...]: for each start, at the M state rows of its window.
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

    `rows[name]` is [B, T, ...], or [B, M, ...] for an agent's stored states; frames of observation
    leaves are stacked. `weight` [B] are the importance weights, normalised to a maximum of 1 and
    applied only by the learner. `max_weight` is their maximum before normalisation; it makes the
    weights of batches from several replays comparable. `keys` [B] identify the items when
    priorities are updated.
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
        """Observations [B, ...] of one row of the window, or of row [B] chosen per item."""
        leaves = self.leaves
        if isinstance(row, int):
            return {name: value[:, row] for name, value in leaves.items()}
        # One index copies whole rows; on a CPU, two indices copy element by element.
        length = next(iter(leaves.values())).shape[1]
        at = torch.arange(0, len(row) * length, length, device=row.device) + row
        return {name: value.flatten(0, 1).index_select(0, at) for name, value in leaves.items()}


class ExperienceSink(Protocol):
    """Destination of an actor's chunks. `add` returns None if the actor must wait and try again."""

    def add(self, chunk: Chunk, priority: np.ndarray | None = None) -> int | None: ...


class Replay(ExperienceSink, Protocol):
    """Replay buffer: stores chunks, samples batches of windows and updates their priorities."""

    def sample(self, n: int) -> Sample | None: ...
    def update(self, keys: np.ndarray, priority: np.ndarray) -> None: ...


@dataclass(frozen=True)
class Segment:
    """Immutable piece of a saved replay.

    Equal names within a run mean equal bytes, so files can be hard-linked. `source` is an existing
    file with the same bytes on the same disk, which may be linked too.
    """

    name: str
    blocks: Callable[[], Iterable[bytes]]
    source: Path | None = None
