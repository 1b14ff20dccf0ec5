"""Layout of a chunk: its columns and rows, shared by chunker, codec, stores and gatherer.

    Example: rows of a chunk with context 3, 8 starts, look-ahead 2 (windows of 3 rows):

        c c c S S S S S S S S a a          the next chunk begins with the last 5 of these rows:
                        c c c S S ...      context for stacking, and the former look-ahead rows
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from qfleet.core.env import OBS_PREFIX, EnvSpec
from qfleet.core.errors import UserError
from qfleet.core.replay import Chunk, Window

BLOCKED_BYTES = 256
"""Columns of at least this many bytes per row are stored compressed, smaller ones as plain arrays."""

BLOCK_ROWS = 16
"""Approximate rows per compressed block: more rows compress better, fewer decompress faster."""

Extras = Mapping[str, tuple[tuple[int, ...], str]]
"""Columns that an agent adds: name -> (shape of a row, dtype)."""


@dataclass(frozen=True)
class Column:
    """A named array of a chunk with rows of `shape`. Observations are stacked from `stack` rows when sampled."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    stack: int = 1
    image: bool = False

    @cached_property
    def row_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize

    @property
    def blocked(self) -> bool:
        return self.row_bytes >= BLOCKED_BYTES

    @property
    def stacked_shape(self) -> tuple[int, ...]:
        if self.stack == 1:
            return self.shape
        return (self.stack * self.shape[0], *self.shape[1:])


@dataclass(frozen=True)
class Layout:
    """The shape of every chunk of a run: R = `rows`, S = `starts`; start i is at row `context + i * stride`.

    `stored_states` are columns that are kept only at the M `state_rows` of each window, counted from its start: a
    recurrent state is as large as a small image, and training needs only the first one of a window.
    """

    spec: EnvSpec
    window: Window
    chunk_steps: int
    extras: Extras = field(default_factory=dict)
    stored_states: Extras = field(default_factory=dict)
    state_rows: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        if self.chunk_steps % self.window.stride or not 1 <= self.window.stride <= self.window.length:
            raise UserError(f"chunks of {self.chunk_steps} steps cannot hold windows of {self.window.length} rows that "
                            f"start every {self.window.stride} steps: replay.chunk_steps must be a multiple of the "
                            "stride, and the stride no longer than the window")
        if reserved := {*self.extras, *self.stored_states} & {"action", "reward", "discount", "last"}:
            raise ValueError(f"extra columns {sorted(reserved)} have reserved names: rename them")

    @cached_property
    def columns(self) -> tuple[Column, ...]:
        fixed = (Column("action", *self.spec.action_spec), Column("reward", (), "float32"),
                 Column("discount", (), "float32"), Column("last", (), "bool"))
        leaves = tuple(Column(OBS_PREFIX + name, leaf.frame_shape, leaf.dtype, leaf.stack, leaf.kind == "image")
                       for name, leaf in self.spec.observation.items())
        extras = tuple(Column(name, tuple(shape), dtype) for name, (shape, dtype) in self.extras.items())
        return fixed + leaves + extras

    @cached_property
    def state_columns(self) -> tuple[Column, ...]:
        """The stored states as columns; a chunk has [S, M, ...] of each."""
        return tuple(Column(name, tuple(shape), dtype) for name, (shape, dtype) in self.stored_states.items())

    @cached_property
    def state_chunk_rows(self) -> np.ndarray:
        """Rows of a chunk at which states are stored, int64 [S, M]."""
        first = self.context + np.arange(self.starts) * self.window.stride
        return first[:, None] + np.array(self.state_rows)

    @cached_property
    def dense(self) -> tuple[Column, ...]:
        return tuple(column for column in self.columns if not column.blocked)

    @cached_property
    def dense_dtype(self) -> np.dtype:
        """Record of the dense columns of one row, so that reading a row is one memory access, not one per column."""
        return np.dtype([(column.name, column.dtype, column.shape) for column in self.dense], align=True)

    @cached_property
    def blocked(self) -> tuple[Column, ...]:
        return tuple(column for column in self.columns if column.blocked)

    @cached_property
    def context(self) -> int:
        return self.spec.stack - 1

    @cached_property
    def lead(self) -> int:
        """Rows of padding before an episode, so that its first steps are trained and not used for burn-in only."""
        return self.window.past if self.window.within_episode else 0

    @cached_property
    def starts(self) -> int:
        return self.chunk_steps // self.window.stride

    @cached_property
    def new_rows(self) -> slice:
        """Rows of a chunk without its overlap with neighbours: over all chunks they contain each row once."""
        first = self.context + self.window.past
        return slice(first, first + self.chunk_steps)

    def steps_of(self, last: np.ndarray) -> int:
        """Number of environment steps in a chunk, given its column `last`, bool [R].

        With `window.within_episode` a chunk ends with its episode and may be short: the rows that are trained and
        neither padding nor final count. All other chunks are full.
        """
        if not self.window.within_episode:
            return self.chunk_steps
        return max(1, int(np.count_nonzero(~last[self.new_rows])))

    @cached_property
    def rows(self) -> int:
        return self.context + self.chunk_steps - self.window.stride + self.window.length

    @cached_property
    def block_rows(self) -> int:
        """Rows per block: close to BLOCK_ROWS, such that the last block of a chunk is not much shorter."""
        return -(-self.rows // max(1, round(self.rows / BLOCK_ROWS)))

    @cached_property
    def blocks(self) -> int:
        return -(-self.rows // self.block_rows)

    def blank(self) -> Chunk:
        """A chunk of padding without valid starts: nothing can be sampled from it."""
        columns = {c.name: np.zeros((self.rows, *c.shape), c.dtype) for c in self.columns}
        columns["last"][:] = True
        columns |= {
            c.name: np.zeros((self.starts, len(self.state_rows), *c.shape), c.dtype) for c in self.state_columns
        }
        return Chunk(columns, np.zeros(self.starts, bool))

    def rows_of_block(self, block: int) -> int:
        return min(self.block_rows, self.rows - block * self.block_rows)
