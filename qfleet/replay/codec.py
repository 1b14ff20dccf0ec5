"""Lossless codec for chunks: wide columns are delta-encoded and compressed in blocks of consecutive rows.

Few pixels change between two steps of a game. A block therefore stores its first row unchanged and every other row as
its XOR with the previous row, which is mostly zeros, and compresses the result with zstd at its fastest level. An
84x84 Atari frame takes 50-260 bytes; frames that are compressed one by one take 3-6 times as much.

A packed chunk in messages and files is a sequence of named arrays, little-endian:

    "QFCK" version:u16 arrays:u16 crc32:u32 | then per array
    name: u8 + utf-8 | dtype: u8 + ascii | dimensions: u8 + u32 each | data

The checksum covers everything after it. Malformed input raises ValueError before any of it is used.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import zstandard

from qfleet.core.replay import Chunk
from qfleet.replay.layout import Column, Layout

LEVEL = 1
MAX_WINDOW_BYTES = 1 << 27
"""Largest zstd window of a block, bytes: zstd's own limit for streaming decompression, which `deltas` uses."""


MAGIC = b"QFCK"
FORMAT_VERSION = 1
_HEADER = struct.Struct("<4sHHI")
_DTYPES = {np.dtype(name).newbyteorder("<").str for name in (
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64")}


@dataclass(frozen=True)
class Blocks:
    """A compressed column of one chunk: concatenated blocks, block i ends at byte `ends[i]`."""

    data: bytes
    ends: np.ndarray

    def __getitem__(self, block: int) -> memoryview:
        begin = int(self.ends[block - 1]) if block else 0
        return memoryview(self.data)[begin:int(self.ends[block])]


@dataclass(frozen=True)
class PackedChunk:
    """A chunk for transport, host storage and checkpoints: wide columns compressed, others and states unchanged."""

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
        return encode_arrays(arrays)

    @staticmethod
    def from_bytes(data: bytes, layout: Layout) -> PackedChunk:
        """Parse a packed chunk; raise ValueError if it is malformed or has another layout."""
        arrays = decode_arrays(data)
        expected: dict[str, tuple[str, tuple[int, ...]]] = {"valid": ("bool", (layout.starts,))}
        expected |= {"dense." + c.name: (c.dtype, (layout.rows, *c.shape)) for c in layout.dense}
        expected |= {
            "dense." + c.name: (c.dtype, (layout.starts, len(layout.state_rows), *c.shape))
            for c in layout.state_columns
        }
        expected |= {"ends." + c.name: ("uint32", (layout.blocks,)) for c in layout.blocked}
        variable = {"data." + c.name for c in layout.blocked}
        if set(arrays) != set(expected) | variable:
            raise ValueError(f"the chunk has the columns {sorted(arrays)} instead of {sorted({*expected, *variable})}")
        for name, (dtype, shape) in expected.items():
            if arrays[name].dtype != np.dtype(dtype) or arrays[name].shape != shape:
                raise ValueError(f"the chunk has another layout: {name} is {arrays[name].dtype} "
                                 f"{arrays[name].shape} instead of {dtype} {shape}")
        blocked = {c.name: Blocks(arrays["data." + c.name].tobytes(), arrays["ends." + c.name]) for c in layout.blocked}
        for column in layout.blocked:
            _check_blocks(layout, column, blocked[column.name])
        dense = {c.name: arrays["dense." + c.name] for c in layout.dense + layout.state_columns}
        return PackedChunk(dense, blocked, arrays["valid"])


def _check_blocks(layout: Layout, column: Column, blocks: Blocks) -> None:
    """Raise ValueError if offsets or declared sizes of the blocks do not match the layout; decompresses nothing."""
    ends = blocks.ends.astype(np.int64)
    if (np.diff(ends, prepend=0) <= 0).any() or ends[-1] != len(blocks.data):
        raise ValueError(f"the block offsets of {column.name} do not match its {len(blocks.data)} bytes")
    for block in range(layout.blocks):
        try:
            size = zstandard.get_frame_parameters(blocks[block]).content_size
        except zstandard.ZstdError as error:
            raise ValueError(f"block {block} of {column.name} is not zstd: {error}") from None
        expected = layout.rows_of_block(block) * column.row_bytes
        if size != expected:
            raise ValueError(f"block {block} of {column.name} declares {size} bytes instead of {expected}")


class Codec:
    """Packs and unpacks chunks of one layout; `unpack(pack(chunk))` equals the chunk. Not thread-safe."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._compressor = zstandard.ZstdCompressor(level=LEVEL)
        self._decompressor = zstandard.ZstdDecompressor()

    def pack(self, chunk: Chunk) -> PackedChunk:
        dense = {column.name: chunk.columns[column.name] for column in self._layout.dense + self._layout.state_columns}
        blocked = {column.name: self._compress(chunk.columns[column.name]) for column in self._layout.blocked}
        return PackedChunk(dense, blocked, chunk.valid)

    def unpack(self, packed: PackedChunk) -> Chunk:
        """Decode a chunk; raise ValueError if a block does not decode to its rows or a float is not finite."""
        return Chunk(self.unpack_columns(packed, self._layout.columns + self._layout.state_columns), packed.valid)

    def unpack_columns(self, packed: PackedChunk, columns: Sequence[Column]) -> dict[str, np.ndarray]:
        """Decode some columns; raises as `unpack` does."""
        return {column.name: packed.dense[column.name] if column.name in packed.dense
                else self._decompress(column, packed.blocked[column.name]) for column in columns}

    def verify(self, packed: PackedChunk) -> None:
        """Raise ValueError if `unpack` would. Integer columns are not delta-decoded: any bytes are valid integers."""
        for column in self._layout.blocked:
            decode = self._decompress if np.dtype(column.dtype).kind == "f" else self._decompress_deltas
            decode(column, packed.blocked[column.name])

    def deltas(self, frames: Sequence[bytes], out: np.ndarray) -> None:
        """Decompress consecutive blocks into out, uint8 [rows, row_bytes], without undoing the XOR of rows.

        One zstd call decodes all blocks and releases the GIL meanwhile.
        """
        reader = self._decompressor.stream_reader(b"".join(frames), read_across_frames=True)
        if (got := reader.readinto(out.reshape(-1))) != out.nbytes:
            raise ValueError(f"the blocks decode to {got} bytes instead of {out.nbytes}")
        if reader.read(1):  # surplus bytes of one block would have shifted all later blocks
            raise ValueError(f"the blocks decode to more than {out.nbytes} bytes")

    def _decompress(self, column: Column, blocks: Blocks) -> np.ndarray:
        rows, size = self._decompress_deltas(column, blocks), self._layout.block_rows
        for at in range(0, self._layout.rows, size):
            rows[at:at + size] = np.bitwise_xor.accumulate(rows[at:at + size], axis=0)
        values = rows.view(column.dtype).reshape(self._layout.rows, *column.shape)
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            raise ValueError(f"column {column.name} of the chunk is not finite")
        return values

    def _decompress_deltas(self, column: Column, blocks: Blocks) -> np.ndarray:
        """Decompress one column into rows, uint8 [R, row_bytes], without undoing the XOR of rows.

        Raises ValueError unless every block is exactly one complete zstd frame; only then can `deltas` decode any
        selection of blocks.
        """
        rows, size = np.empty((self._layout.rows, column.row_bytes), np.uint8), self._layout.block_rows
        for block in range(self._layout.blocks):
            target = rows[block * size:(block + 1) * size].reshape(-1)
            try:
                window = zstandard.get_frame_parameters(blocks[block]).window_size
                data = self._decompressor.decompress(blocks[block], allow_extra_data=False)
            except zstandard.ZstdError as error:
                raise ValueError(f"block {block} of {column.name} does not decode: {error}") from None
            if len(data) != len(target):
                raise ValueError(f"block {block} of {column.name} has {len(data)} bytes instead of {len(target)}")
            if window > MAX_WINDOW_BYTES:
                raise ValueError(f"block {block} of {column.name} has a zstd window of {window} bytes, the limit is "
                                 f"{MAX_WINDOW_BYTES}")
            target[:] = np.frombuffer(data, np.uint8)
        return rows

    def _compress(self, values: np.ndarray) -> Blocks:
        rows = np.ascontiguousarray(values).reshape(self._layout.rows, -1).view(np.uint8)
        deltas = rows.copy()
        deltas[1:] ^= rows[:-1]
        size = self._layout.block_rows
        deltas[::size] = rows[::size]
        frames = [self._compressor.compress(deltas[at:at + size].data) for at in range(0, self._layout.rows, size)]
        return Blocks(b"".join(frames), np.cumsum([len(frame) for frame in frames]).astype(np.uint32))


def encode_arrays(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Encode numeric and boolean arrays; `decode_arrays` returns equal arrays."""
    parts = []
    for name, array in arrays.items():
        array = np.asarray(array, array.dtype.newbyteorder("<"), order="C")
        if array.dtype.str not in _DTYPES:
            raise ValueError(f"array {name!r} has dtype {array.dtype}, which cannot be encoded")
        for text in (name.encode(), array.dtype.str.encode()):
            parts += [struct.pack("<B", len(text)), text]
        parts += [struct.pack(f"<B{array.ndim}I", array.ndim, *array.shape), array.tobytes()]
    body = b"".join(parts)
    return _HEADER.pack(MAGIC, FORMAT_VERSION, len(arrays), zlib.crc32(body)) + body


def decode_arrays(data: bytes) -> dict[str, np.ndarray]:
    """Decode arrays; they are read-only views of `data`."""
    if len(data) < _HEADER.size:
        raise ValueError(f"{len(data)} bytes are too few for a frame")
    magic, version, count, crc = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise ValueError(f"these bytes do not begin with {MAGIC!r}")
    if version != FORMAT_VERSION:
        raise ValueError(f"frame version {version} is not the {FORMAT_VERSION} that this qfleet reads")
    if zlib.crc32(memoryview(data)[_HEADER.size:]) != crc:
        raise ValueError("the frame's checksum does not match: bytes were lost or changed")
    reader = _Reader(data, _HEADER.size)
    try:
        arrays = dict(reader.array() for _ in range(count))
    except UnicodeDecodeError as error:
        raise ValueError(f"malformed frame: {error}") from None
    if reader.at != len(data) or len(arrays) != count:
        raise ValueError("malformed frame: its length or names do not add up")
    return arrays


class _Reader:
    """Cursor over encoded bytes that checks every length against the bytes left."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data = data
        self.at = at

    def array(self) -> tuple[str, np.ndarray]:
        name = self._take(self._unpack("B", 1)[0]).decode()
        code = self._take(self._unpack("B", 1)[0]).decode("ascii")
        if code not in _DTYPES:
            raise ValueError(f"malformed frame: dtype {code!r} is not known")
        dtype = np.dtype(code)
        shape = self._unpack("I", self._unpack("B", 1)[0])
        count = 1
        for size in shape:
            count *= size
        at = self._advance(count * dtype.itemsize)
        return name, np.frombuffer(self._data, dtype, count, at).reshape(shape)

    def _unpack(self, code: str, count: int) -> tuple[int, ...]:
        layout = struct.Struct(f"<{count}{code}")
        return layout.unpack_from(self._data, self._advance(layout.size))

    def _take(self, size: int) -> bytes:
        at = self._advance(size)
        return self._data[at:at + size]

    def _advance(self, size: int) -> int:
        """Skip `size` bytes and return the offset where they begin."""
        if size > len(self._data) - self.at:
            raise ValueError(f"malformed frame: {size} bytes announced, {len(self._data) - self.at} left")
        self.at += size
        return self.at - size
