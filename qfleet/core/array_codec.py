"""Binary encoding of named arrays for network messages and files, without pickle.

    "QFCK" version:u16 arrays:u16 crc32:u32 | then per array, little-endian:
    name: u8 + utf-8 | dtype: u8 + ascii | dimensions: u8 + u32 each | data

The checksum covers everything after it. Malformed input raises ValueError before any of it is used.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping

import numpy as np

MAGIC = b"QFCK"
VERSION = 1
_HEADER = struct.Struct("<4sHHI")
_DTYPES = {np.dtype(name).newbyteorder("<").str for name in (
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64")}


def to_bytes(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Encode numeric and boolean arrays; `from_bytes` returns equal arrays."""
    parts = []
    for name, array in arrays.items():
        array = np.asarray(array, array.dtype.newbyteorder("<"), order="C")
        if array.dtype.str not in _DTYPES:
            raise ValueError(f"array {name!r} has dtype {array.dtype}, which cannot be encoded")
        for text in (name.encode(), array.dtype.str.encode()):
            parts += [struct.pack("<B", len(text)), text]
        parts += [struct.pack(f"<B{array.ndim}I", array.ndim, *array.shape), array.tobytes()]
    body = b"".join(parts)
    return _HEADER.pack(MAGIC, VERSION, len(arrays), zlib.crc32(body)) + body


def from_bytes(data: bytes) -> dict[str, np.ndarray]:
    """Decode arrays; they are read-only views of `data`."""
    if len(data) < _HEADER.size:
        raise ValueError(f"{len(data)} bytes are too few for a frame")
    magic, version, count, crc = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise ValueError(f"these bytes do not begin with {MAGIC!r}")
    if version != VERSION:
        raise ValueError(f"frame version {version} is not the {VERSION} that this qfleet reads")
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
