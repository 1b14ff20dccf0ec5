"""Blocked columns out of compressed chunks: windows of stacked rows, decoded by several threads.

A batch is cut into parts of a few megabytes. For each, one call decompresses all blocks and another, compiled, puts the
windows together. Both leave the interpreter to other threads: with a call for every block and window its lock goes from
hand to hand, and two threads take longer than one.

Shapes: B windows, T rows of a window, K frames of a stack, W words of a row, N blocks that a window may touch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from qfleet.maths.compiled import jit
from qfleet.replay.codec import Codec
from qfleet.replay.layout import Column, Layout
from qfleet.replay.thread_team import ThreadTeam

PART_BYTES = 8 << 20
"""Decompressed bytes of a part, at most: they stay in a cache, and a part is worth the waking of a thread."""


class Decoder:
    """Reads windows of blocked columns: the block that ends at byte `ends[name][slot, i]` of `data[name][slot]` is
    block i of its chunk.

    The caller's thread and `threads - 1` others take part after part; each part has windows of its own, so that their
    number changes no result.
    """

    def __init__(self, layout: Layout, data: Mapping[str, Sequence[bytes]], ends: Mapping[str, np.ndarray],
                 threads: int) -> None:
        self._layout, self._data, self._ends = layout, data, ends
        most = max((self._touched(column) * self._block_bytes(column) for column in layout.blocked), default=0)
        # Pages of these rooms cost nothing until they are written.
        self._workspaces = [(Codec(layout), np.empty(max(PART_BYTES, most), np.uint8)) for _ in range(threads)]
        self._hands = ThreadTeam(threads)

    def fill(self, column: Column, slots: np.ndarray, first: np.ndarray, alive: np.ndarray, out: np.ndarray) -> None:
        """Write into out [B, T, K, row] the stacks of the windows whose first row is row `first[i]` of the chunk in
        `slots[i]`; zeros for frames that are not `alive` [B, T, K]."""
        # Eight bytes at a time where rows allow it: compiled, the loops over single bytes are four times slower.
        words = out.view(np.uint64 if column.row_bytes % 8 == 0 else np.uint8)
        count = max(1, PART_BYTES // (self._touched(column) * self._block_bytes(column)))
        parts = [(column, slots[at:at + count], first[at:at + count], alive[at:at + count], words[at:at + count])
                 for at in range(0, len(slots), count)]
        todo = iter(parts)
        self._hands([partial(self._work, *desk, todo) for desk in self._workspaces[:max(1, len(parts))]])

    def _work(self, codec: Codec, room: np.ndarray, todo: Iterator[tuple]) -> None:
        for part in todo:
            self._decode(codec, room, *part)

    def _decode(self, codec: Codec, room: np.ndarray, column: Column, slots: np.ndarray, first: np.ndarray,
                alive: np.ndarray, out: np.ndarray) -> None:
        size, oldest, data = self._layout.block_rows, first - column.stack + 1, self._data[column.name]
        at = np.empty((len(slots), self._touched(column)), np.int64)
        frames, rows = plan_blocks(slots, oldest, alive.shape[1] + alive.shape[2] - 1, size, self._layout.rows,
                                   self._ends[column.name], at)
        deltas = room[:rows * column.row_bytes].reshape(rows, -1)
        codec.deltas([data[slot][begin:end] for slot, begin, end in frames.tolist()], deltas)
        undo_deltas(deltas.view(out.dtype), at, oldest % size, size, alive, out)

    def _touched(self, column: Column) -> int:
        """N: blocks that a window and the frames before it may lie in."""
        rows, size = self._layout.window.length + column.stack - 1, self._layout.block_rows
        return min(self._layout.blocks, (rows + size - 2) // size + 1)

    def _block_bytes(self, column: Column) -> int:
        return self._layout.block_rows * column.row_bytes


@jit
def plan_blocks(slots: np.ndarray, oldest: np.ndarray, rows: int, size: int, total: int, ends: np.ndarray,
                at: np.ndarray) -> tuple[np.ndarray, int]:
    """Which blocks windows of `rows` rows from row `oldest[b]` lie in, each block once where windows follow one another
    as they do in the replay: (slot, first byte, end) of each, and how many rows they have in all.

    Blocks have `size` rows, the last of a chunk what is left of its `total`. Of the blocks that are decompressed, one
    after the other, the n-th one that window b touches begins at row at[b, n], which is written.
    """
    frames = np.empty((at.size, 3), np.int64)
    found, stop, before = 0, 0, 0
    for b in range(len(slots)):
        head, tail = oldest[b] // size, (oldest[b] + rows - 1) // size
        for block in range(head, tail + 1):
            if b > 0 and slots[b] == slots[b - 1] and before <= block <= (oldest[b - 1] + rows - 1) // size:
                at[b, block - head] = at[b - 1, block - before]
                continue
            frames[found, 0] = slots[b]
            frames[found, 1] = ends[slots[b], block - 1] if block > 0 else 0
            frames[found, 2] = ends[slots[b], block]
            at[b, block - head] = stop
            found, stop = found + 1, stop + min(size, total - block * size)
        before = head
    return frames[:found], stop


@jit
def undo_deltas(
    deltas: np.ndarray, at: np.ndarray, skip: np.ndarray, size: int, alive: np.ndarray, out: np.ndarray
) -> None:
    """Rebuild the rows of windows from what changed, and write them wherever a stack shows them.

    deltas [rows, W] and out [B, T, K, W] are words of bytes. The n-th block, of `size` rows, that window b touches
    begins at row at[b, n] of deltas; skip[b] rows of the first one come before the window's oldest frame. Frame f,
    counted from there, is frame k = f - t of the stack at position t.
    """
    count, length, depth = alive.shape
    frame = np.empty_like(deltas[0])
    for b in range(count):
        for row in range(skip[b] + length + depth - 1):
            delta = deltas[at[b, row // size] + row % size]
            if row % size == 0:
                frame[:] = delta
            else:
                np.bitwise_xor(frame, delta, frame)
            shown = row - skip[b]
            for t in range(max(0, shown - depth + 1), min(length, shown + 1)):
                if alive[b, t, shown - t]:
                    out[b, t, shown - t, :] = frame
                else:
                    out[b, t, shown - t, :] = 0
