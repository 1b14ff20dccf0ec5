"""Named arrays as bytes: what crosses a wire or rests in a file, and never a pickle.

    "QFCK" version:u16 arrays:u16 crc32:u32 | then per array, little-endian:
    name: u8 + utf-8 | dtype: u8 + ascii | dimensions: u8 + u32 each | data

The checksum covers all that follows it. Whatever is malformed raises ValueError before anything is believed.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping

import numpy as np

MAGIC = b"QFCK"
VERSION = 1
_HEAD = struct.Struct("<4sHHI")
_DTYPES = {np.dtype(name).newbyteorder("<").str for name in (
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64")}


def to_bytes(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Frame arrays of numbers and booleans; `from_bytes` gives equal ones back."""
    parts = []
    for name, array in arrays.items():
        array = np.asarray(array, array.dtype.newbyteorder("<"), order="C")
        if array.dtype.str not in _DTYPES:
            raise ValueError(f"array {name!r} has dtype {array.dtype}, which is not framed")
        for text in (name.encode(), array.dtype.str.encode()):
            parts += [struct.pack("<B", len(text)), text]
        parts += [struct.pack(f"<B{array.ndim}I", array.ndim, *array.shape), array.tobytes()]
    body = b"".join(parts)
    return _HEAD.pack(MAGIC, VERSION, len(arrays), zlib.crc32(body)) + body


def from_bytes(data: bytes) -> dict[str, np.ndarray]:
    """Read framed arrays; they are views of `data`, read-only."""
    if len(data) < _HEAD.size:
        raise ValueError(f"{len(data)} bytes are too few for a frame")
    magic, version, count, crc = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise ValueError(f"these bytes do not begin with {MAGIC!r}")
    if version != VERSION:
        raise ValueError(f"frame version {version} is not the {VERSION} that this qfleet reads")
    if zlib.crc32(memoryview(data)[_HEAD.size:]) != crc:
        raise ValueError("the frame's checksum does not match: bytes were lost or changed")
    reader = _Reader(data, _HEAD.size)
    try:
        arrays = dict(reader.array() for _ in range(count))
    except UnicodeDecodeError as error:
        raise ValueError(f"malformed frame: {error}") from None
    if reader.at != len(data) or len(arrays) != count:
        raise ValueError("malformed frame: its length or names do not add up")
    return arrays


class _Reader:
    """Walks through framed bytes; every length is checked against what is left."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data = data
        self.at = at

    def array(self) -> tuple[str, np.ndarray]:
        name = self._take(self._numbers("B", 1)[0]).decode()
        code = self._take(self._numbers("B", 1)[0]).decode("ascii")
        if code not in _DTYPES:
            raise ValueError(f"malformed frame: dtype {code!r} is not known")
        dtype = np.dtype(code)
        shape = self._numbers("I", self._numbers("B", 1)[0])
        count = 1
        for size in shape:
            count *= size
        at = self._advance(count * dtype.itemsize)
        return name, np.frombuffer(self._data, dtype, count, at).reshape(shape)

    def _numbers(self, code: str, count: int) -> tuple[int, ...]:
        layout = struct.Struct(f"<{count}{code}")
        return layout.unpack_from(self._data, self._advance(layout.size))

    def _take(self, size: int) -> bytes:
        at = self._advance(size)
        return self._data[at:at + size]

    def _advance(self, size: int) -> int:
        """Step over `size` bytes and return where they begin."""
        if size > len(self._data) - self.at:
            raise ValueError(f"malformed frame: {size} bytes announced, {len(self._data) - self.at} left")
        self.at += size
        return self.at - size
