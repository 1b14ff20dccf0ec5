"""Multi-threaded decoder: reads windows of stacked rows from the compressed columns of stored chunks.

A batch is split into parts of a few megabytes. Per part, one call decompresses all blocks and one compiled function
assembles the windows. Both release the GIL: with one call per block and window, contention for the GIL makes two
threads slower than one.

Shapes: B windows, T rows of a window, K frames of a stack, W words of a row, N blocks that a window may overlap.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from qfleet.core.jit import jit
from qfleet.replay.codec import Codec
from qfleet.replay.layout import Column, Layout
from qfleet.replay.thread_team import ThreadTeam

PART_BYTES = 8 << 20
"""Most decompressed bytes per part: few enough for the CPU cache, enough to make waking a thread worthwhile."""


class Decoder:
    """Decodes windows of the compressed columns of the chunks in all slots.

    Block i of the chunk in a slot ends at byte `ends[name][slot, i]` of `data[name][slot]`. The calling thread and
    `threads - 1` others process the parts of a batch. Parts share no windows, so results do not depend on `threads`.
    """

    def __init__(self, layout: Layout, data: Mapping[str, Sequence[bytes]], ends: Mapping[str, np.ndarray],
                 threads: int) -> None:
        self._layout, self._data, self._ends = layout, data, ends
        largest = max((self._blocks_per_window(column) * self._block_bytes(column) for column in layout.blocked),
                      default=0)
        # Pages of these buffers use no memory until they are written.
        self._workspaces = [(Codec(layout), np.empty(max(PART_BYTES, largest), np.uint8)) for _ in range(threads)]
        self._threads = ThreadTeam(threads)

    def fill(self, column: Column, slots: np.ndarray, first: np.ndarray, alive: np.ndarray, out: np.ndarray) -> None:
        """Write the frame stacks of B windows to out [B, T, K, row]; frames that are not `alive` [B, T, K] are zeros.

        Window i begins at row `first[i]` of the chunk in `slots[i]`.
        """
        # Words of eight bytes where the row size allows: compiled loops over single bytes are four times slower.
        words = out.view(np.uint64 if column.row_bytes % 8 == 0 else np.uint8)
        count = max(1, PART_BYTES // (self._blocks_per_window(column) * self._block_bytes(column)))
        parts = [(column, slots[at:at + count], first[at:at + count], alive[at:at + count], words[at:at + count])
                 for at in range(0, len(slots), count)]
        pending = iter(parts)
        jobs = [partial(self._work, *workspace, pending) for workspace in self._workspaces[:max(1, len(parts))]]
        self._threads(jobs)

    def _work(self, codec: Codec, buffer: np.ndarray, pending: Iterator[tuple]) -> None:
        """Decode pending parts until none is left; runs on every thread."""
        for part in pending:
            self._decode(codec, buffer, *part)

    def _decode(self, codec: Codec, buffer: np.ndarray, column: Column, slots: np.ndarray, first: np.ndarray,
                alive: np.ndarray, out: np.ndarray) -> None:
        size, oldest, data = self._layout.block_rows, first - column.stack + 1, self._data[column.name]
        at = np.empty((len(slots), self._blocks_per_window(column)), np.int64)
        frames, rows = plan_blocks(slots, oldest, alive.shape[1] + alive.shape[2] - 1, size, self._layout.rows,
                                   self._ends[column.name], at)
        deltas = buffer[:rows * column.row_bytes].reshape(rows, -1)
        codec.deltas([data[slot][begin:end] for slot, begin, end in frames.tolist()], deltas)
        undo_deltas(deltas.view(out.dtype), at, oldest % size, size, alive, out)

    def _blocks_per_window(self, column: Column) -> int:
        """N: most blocks that a window with its stacking context overlaps."""
        rows, size = self._layout.window.length + column.stack - 1, self._layout.block_rows
        return min(self._layout.blocks, (rows + size - 2) // size + 1)

    def _block_bytes(self, column: Column) -> int:
        return self._layout.block_rows * column.row_bytes


@jit
def plan_blocks(slots: np.ndarray, oldest: np.ndarray, rows: int, size: int, total: int, ends: np.ndarray,
                at: np.ndarray) -> tuple[np.ndarray, int]:
    """List the blocks that windows of `rows` rows, beginning at row `oldest[b]`, overlap.

    Returns (slot, first byte, end byte) of every block, int64 [blocks, 3], and their total number of rows. A block is
    listed once if the windows are sorted by position, as sampled windows are. Blocks have `size` rows; the last block
    of a chunk has the rest of its `total` rows. Writes at[b, n]: the row at which the n-th block of window b begins in
    the concatenation of these blocks.
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
    """Undo the XOR of rows and write every frame to all stacks that contain it.

    deltas [rows, W] and out [B, T, K, W] are words of bytes. The n-th block of window b begins at row at[b, n] of
    deltas; blocks have `size` rows. The first skip[b] rows of block 0 precede the window's oldest frame. Frame f,
    counted from the oldest, is frame k = f - t of the stack at position t.
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
            f = row - skip[b]
            for t in range(max(0, f - depth + 1), min(length, f + 1)):
                if alive[b, t, f - t]:
                    out[b, t, f - t, :] = frame
                else:
                    out[b, t, f - t, :] = 0
