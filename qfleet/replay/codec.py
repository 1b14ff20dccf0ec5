"""Compresses the wide columns of a chunk in blocks of consecutive rows, without loss.

Between two steps of a game few pixels change. So a block keeps its first row as it is and of every other row only the
XOR with the row before, mostly zeros, and zstd's fastest level does the rest: 50-260 bytes per 84x84 Atari frame, where
frames packed one by one need 3-6 times as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import zstandard

from qfleet.core import array_codec
from qfleet.core.replay import Chunk
from qfleet.replay.layout import Column, Layout

LEVEL = 1
MOST_WINDOW = 1 << 27
"""Bytes of history that a frame may ask its decoder to keep: zstd's own limit where frames are read as a stream."""


@dataclass(frozen=True)
class Blocks:
    """A blocked column of one chunk: compressed blocks one after the other, block i ending at byte `ends[i]`."""

    data: bytes
    ends: np.ndarray

    def __getitem__(self, block: int) -> memoryview:
        begin = int(self.ends[block - 1]) if block else 0
        return memoryview(self.data)[begin:int(self.ends[block])]


@dataclass(frozen=True)
class PackedChunk:
    """A chunk as it travels, rests and is saved: blocked columns compressed, others, and states, as they are."""

    dense: dict[str, np.ndarray]
    blocked: dict[str, Blocks]
    valid: np.ndarray

    @property
    def last(self) -> np.ndarray:
        """Bool [R]: final rows and padding."""
        return self.dense["last"]

    def to_bytes(self) -> bytes:
        arrays = {"valid": self.valid}
        arrays |= {"dense." + name: values for name, values in self.dense.items()}
        for name, blocks in self.blocked.items():
            arrays["ends." + name] = blocks.ends
            arrays["data." + name] = np.frombuffer(blocks.data, np.uint8)
        return array_codec.to_bytes(arrays)

    @staticmethod
    def from_bytes(data: bytes, layout: Layout) -> PackedChunk:
        """Read a packed chunk of this layout; anything else raises ValueError."""
        arrays = array_codec.from_bytes(data)
        wanted: dict[str, tuple[str, tuple[int, ...]]] = {"valid": ("bool", (layout.starts,))}
        wanted |= {"dense." + c.name: (c.dtype, (layout.rows, *c.shape)) for c in layout.dense}
        wanted |= {
            "dense." + c.name: (c.dtype, (layout.starts, len(layout.state_rows), *c.shape))
            for c in layout.state_columns
        }
        wanted |= {"ends." + c.name: ("uint32", (layout.blocks,)) for c in layout.blocked}
        free = {"data." + c.name for c in layout.blocked}
        if set(arrays) != set(wanted) | free:
            raise ValueError(f"a chunk of other columns: {sorted(arrays)} instead of {sorted({*wanted, *free})}")
        for name, (dtype, shape) in wanted.items():
            if arrays[name].dtype != np.dtype(dtype) or arrays[name].shape != shape:
                raise ValueError(f"a chunk of another layout: {name} is {arrays[name].dtype} {arrays[name].shape} "
                                 f"instead of {dtype} {shape}")
        blocked = {c.name: Blocks(arrays["data." + c.name].tobytes(), arrays["ends." + c.name]) for c in layout.blocked}
        for column in layout.blocked:
            _check(layout, column, blocked[column.name])
        dense = {c.name: arrays["dense." + c.name] for c in layout.dense + layout.state_columns}
        return PackedChunk(dense, blocked, arrays["valid"])


def _check(layout: Layout, column: Column, blocks: Blocks) -> None:
    """Refuse blocks whose borders or announced sizes are not the layout's, before anything is decompressed."""
    ends = blocks.ends.astype(np.int64)
    if (np.diff(ends, prepend=0) <= 0).any() or ends[-1] != len(blocks.data):
        raise ValueError(f"the blocks of {column.name} do not add up to its {len(blocks.data)} bytes")
    for block in range(layout.blocks):
        try:
            size = zstandard.get_frame_parameters(blocks[block]).content_size
        except zstandard.ZstdError as error:
            raise ValueError(f"block {block} of {column.name} is not zstd: {error}") from None
        if size != layout.rows_of_block(block) * column.row_bytes:
            raise ValueError(f"block {block} of {column.name} announces {size} bytes, which is not a block of its rows")


class Codec:
    """Packs and unpacks chunks of one layout; `unpack(pack(chunk))` is the chunk. Not for several threads at once."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._compressor = zstandard.ZstdCompressor(level=LEVEL)
        self._decompressor = zstandard.ZstdDecompressor()

    def pack(self, chunk: Chunk) -> PackedChunk:
        dense = {column.name: chunk.columns[column.name] for column in self._layout.dense + self._layout.state_columns}
        blocked = {column.name: self._compress(chunk.columns[column.name]) for column in self._layout.blocked}
        return PackedChunk(dense, blocked, chunk.valid)

    def unpack(self, packed: PackedChunk) -> Chunk:
        """Decode a chunk; ValueError if its blocks do not decode to their rows, or to numbers that are not finite."""
        columns = dict(packed.dense)
        for column in self._layout.blocked:
            columns[column.name] = self._decompress(column, packed.blocked[column.name])
        order = self._layout.columns + self._layout.state_columns
        return Chunk({column.name: columns[column.name] for column in order}, packed.valid)

    def verify(self, packed: PackedChunk) -> None:
        """Raise ValueError where `unpack` would. Integers are not delta-decoded: any bytes are valid integers."""
        for column in self._layout.blocked:
            decode = self._decompress if np.dtype(column.dtype).kind == "f" else self._differences
            decode(column, packed.blocked[column.name])

    def deltas(self, frames: Sequence[bytes], out: np.ndarray) -> None:
        """Decompress blocks, one after the other, into out, uint8 [rows, row_bytes]: of each its first row, then what
        changed from row to row. It is one call for all of them, during which other threads have the interpreter."""
        reader = self._decompressor.stream_reader(b"".join(frames), read_across_frames=True)
        if (got := reader.readinto(out.reshape(-1))) != out.nbytes:
            raise ValueError(f"blocks of {out.nbytes} bytes are cut off after {got}")
        if reader.read(1):  # what one block had too much would have shifted all that came after it
            raise ValueError(f"blocks of {out.nbytes} bytes go on after them")

    def _decompress(self, column: Column, blocks: Blocks) -> np.ndarray:
        rows, size = self._differences(column, blocks), self._layout.block_rows
        for at in range(0, self._layout.rows, size):
            rows[at:at + size] = np.bitwise_xor.accumulate(rows[at:at + size], axis=0)
        values = rows.view(column.dtype).reshape(self._layout.rows, *column.shape)
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            raise ValueError(f"column {column.name} of a chunk is not finite")
        return values

    def _differences(self, column: Column, blocks: Blocks) -> np.ndarray:
        """Rows as `deltas` gives them, uint8 [R, row_bytes]. Each block must be one whole frame and nothing else: then
        `deltas` decodes any selection of blocks."""
        rows, size = np.empty((self._layout.rows, column.row_bytes), np.uint8), self._layout.block_rows
        for block in range(self._layout.blocks):
            room = rows[block * size:(block + 1) * size].reshape(-1)
            try:
                window = zstandard.get_frame_parameters(blocks[block]).window_size
                data = self._decompressor.decompress(blocks[block], allow_extra_data=False)
            except zstandard.ZstdError as error:
                raise ValueError(f"block {block} of {column.name} does not decode: {error}") from None
            if len(data) != len(room):
                raise ValueError(f"block {block} of {column.name} has {len(data)} bytes instead of {len(room)}")
            if window > MOST_WINDOW:
                raise ValueError(f"block {block} of {column.name} asks for {window} bytes of history")
            room[:] = np.frombuffer(data, np.uint8)
        return rows

    def _compress(self, values: np.ndarray) -> Blocks:
        rows = np.ascontiguousarray(values).reshape(self._layout.rows, -1).view(np.uint8)
        deltas = rows.copy()
        deltas[1:] ^= rows[:-1]
        size = self._layout.block_rows
        deltas[::size] = rows[::size]
        frames = [self._compressor.compress(deltas[at:at + size].data) for at in range(0, self._layout.rows, size)]
        return Blocks(b"".join(frames), np.cumsum([len(frame) for frame in frames]).astype(np.uint32))
