"""Windows, chunks and samples, and the protocols of a replay."""

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
    """The part of a replay that actors write to. `add` returns None if the actor has to wait."""

    def add(self, chunk: Chunk, priority: np.ndarray | None = None) -> int | None: ...


class Replay(ExperienceSink, Protocol):
    """A store of experience that learners sample from."""

    def sample(self, n: int) -> Sample | None: ...
    def update(self, keys: np.ndarray, priority: np.ndarray) -> None: ...


@dataclass(frozen=True)
class Segment:
    """An immutable piece of saved replay: equal names in one run mean equal bytes, so files can be hard-linked.

    `source` is a file on the same disk that holds those bytes already and may be linked, too.
    """

    name: str
    blocks: Callable[[], Iterable[bytes]]
    source: Path | None = None
