"""Which columns and rows a chunk has: shared by those who cut, pack, store and gather it.

    rows of a chunk, context 3, 8 starts, look-ahead 2 (window of 3 rows):

        c c c S S S S S S S S a a          the next chunk begins with the last 5 of these rows:
                        c c c S S ...      context for stacking, and the rows that were only looked at
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
"""Columns of at least this many bytes per row rest compressed; smaller ones as plain arrays."""

BLOCK_ROWS = 16
"""Rows per compressed block, about: more compress better, fewer are quicker to open."""

Extras = Mapping[str, tuple[tuple[int, ...], str]]
"""An agent's own columns: name -> (shape of a row, dtype)."""


@dataclass(frozen=True)
class Column:
    """One named array of a chunk; a row of it has `shape`. Observations are restacked from `stack` rows."""

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
    """The shape of every chunk of a run. R = `rows`, S = `starts`; start i lies at row `context + i * stride`.

    `states` are columns that are kept at M `marks` of each window only, rows counted from its start: a recurrent state
    is as large as a small picture, and nothing but the first one of a window is of use.
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
        if taken := {*self.extras, *self.stored_states} & {"action", "reward", "discount", "last"}:
            raise ValueError(f"extras may not be called {sorted(taken)}: every row has columns of that name")

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
        """The columns of states: a chunk has [S, M, ...] of each."""
        return tuple(Column(name, tuple(shape), dtype) for name, (shape, dtype) in self.stored_states.items())

    @cached_property
    def state_chunk_rows(self) -> np.ndarray:
        """Int64 [S, M]: at which rows of a chunk states are kept."""
        first = self.context + np.arange(self.starts) * self.window.stride
        return first[:, None] + np.array(self.state_rows)

    @cached_property
    def dense(self) -> tuple[Column, ...]:
        return tuple(column for column in self.columns if not column.blocked)

    @cached_property
    def dense_dtype(self) -> np.dtype:
        """The dense columns of one row side by side, so that a row is one access to memory and not one per column."""
        return np.dtype([(column.name, column.dtype, column.shape) for column in self.dense], align=True)

    @cached_property
    def blocked(self) -> tuple[Column, ...]:
        return tuple(column for column in self.columns if column.blocked)

    @cached_property
    def context(self) -> int:
        return self.spec.stack - 1

    @cached_property
    def lead(self) -> int:
        """Rows of padding before an episode, so that its first steps are trained, too, and not burnt in only."""
        return self.window.past if self.window.within_episode else 0

    @cached_property
    def starts(self) -> int:
        return self.chunk_steps // self.window.stride

    def steps_of(self, last: np.ndarray) -> int:
        """Environment steps that a chunk with these final rows and padding, bool [R], adds to what is kept.

        With whole windows a chunk ends with its episode, however short that is: counted are the rows that are trained
        from its starts and neither padding nor final. Chunks of an endless stream are full.
        """
        if not self.window.within_episode:
            return self.chunk_steps
        first = self.context + self.window.past
        return max(1, int(np.count_nonzero(~last[first:first + self.chunk_steps])))

    @cached_property
    def rows(self) -> int:
        return self.context + self.chunk_steps - self.window.stride + self.window.length

    @cached_property
    def block_rows(self) -> int:
        """Rows per block, chosen near BLOCK_ROWS so that no stump of a block is left at the end."""
        return -(-self.rows // max(1, round(self.rows / BLOCK_ROWS)))

    @cached_property
    def blocks(self) -> int:
        return -(-self.rows // self.block_rows)

    def blank(self) -> Chunk:
        """A chunk of final rows without a valid start: it holds nothing that can be trained."""
        columns = {c.name: np.zeros((self.rows, *c.shape), c.dtype) for c in self.columns}
        columns["last"][:] = True
        columns |= {
            c.name: np.zeros((self.starts, len(self.state_rows), *c.shape), c.dtype) for c in self.state_columns
        }
        return Chunk(columns, np.zeros(self.starts, bool))

    def rows_of_block(self, block: int) -> int:
        return min(self.block_rows, self.rows - block * self.block_rows)
