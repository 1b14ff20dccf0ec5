"""Named arrays over a pipe: length-prefixed frames of a JSON header and raw bytes; nothing is unpickled.

    magic 4s | header bytes u32 | body bytes u64 | header (JSON, padded) | body (arrays, each aligned to 16 bytes)
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

MAGIC = b"QFF1"
PREFIX = struct.Struct("!4sIQ")
ALIGN = 16
MAX_HEADER_BYTES = 1 << 20
MAX_BODY_BYTES = 1 << 31


class FrameError(Exception):
    """Bytes from the pipe that are not a valid frame, or not the expected one."""


@dataclass(frozen=True)
class Frame:
    """One message: its kind, small values as JSON (`facts`), and numeric arrays."""

    kind: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)


def encode(frame: Frame) -> bytes:
    """Bytes of a frame. Raises FrameError for arrays that are neither numeric nor boolean."""
    entries, pieces, size = [], [], 0
    for name, value in frame.arrays.items():
        array = np.asarray(value, order="C")
        _check_dtype(name, array.dtype)
        gap = -size % ALIGN
        pieces += [bytes(gap), array.tobytes()]
        size += gap + array.nbytes
        entries.append([name, array.dtype.str, list(array.shape)])
    header = json.dumps({"kind": frame.kind, "facts": dict(frame.facts), "arrays": entries}).encode()
    header += b" " * (-len(header) % ALIGN)  # keeps the body aligned in the reader's memory
    _check_sizes(len(header), size)
    return b"".join([PREFIX.pack(MAGIC, len(header), size), header, *pieces])


class FrameDecoder:
    """Assembles frames from reads of any size.

    Read into `buffer`, then pass the number of bytes to `advance`, which returns the frame once it is complete. The
    arrays are views of memory owned by that frame alone, so they may be kept and written to.
    """

    def __init__(self) -> None:
        self._sizes: tuple[int, int] | None = None  # of header and body, known after the prefix
        self._space = memoryview(bytearray(PREFIX.size))
        self._filled = 0

    @property
    def buffer(self) -> memoryview:
        return self._space[self._filled:]

    @property
    def partial(self) -> bool:
        """True if a frame has started and is incomplete."""
        return self._filled > 0 or self._sizes is not None

    def advance(self, count: int) -> Frame | None:
        self._filled += count
        if self._filled < len(self._space):
            return None
        if self._sizes is None:
            self._sizes = _sizes(self._space)
            self._space, self._filled = np.empty(sum(self._sizes), np.uint8).data, 0
            return None
        header_bytes, _ = self._sizes
        whole = np.frombuffer(self._space, np.uint8)
        self._sizes, self._space, self._filled = None, memoryview(bytearray(PREFIX.size)), 0
        return _decode(whole[:header_bytes].tobytes(), whole[header_bytes:])


def _sizes(prefix: memoryview) -> tuple[int, int]:
    magic, header_bytes, body_bytes = PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise FrameError(f"not a frame: it begins with {bytes(prefix)!r} instead of {MAGIC!r}")
    _check_sizes(header_bytes, body_bytes)
    return header_bytes, body_bytes


def _decode(header: bytes, body: np.ndarray) -> Frame:
    try:
        fields = json.loads(header)
        kind, facts, entries = fields["kind"], fields["facts"], fields["arrays"]
        plan = [(str(name), np.dtype(dtype), tuple(int(n) for n in shape)) for name, dtype, shape in entries]
    except (ValueError, TypeError, KeyError) as error:
        raise FrameError(f"unreadable header {header[:200]!r}: {error!r}") from None
    if not isinstance(kind, str) or not isinstance(facts, dict):
        raise FrameError(f"unreadable header {header[:200]!r}: kind must be a string and facts a mapping")
    arrays, offset = {}, 0
    for name, dtype, shape in plan:
        _check_dtype(name, dtype)
        if any(n < 0 for n in shape):
            raise FrameError(f"array {name!r} has the shape {shape}")
        offset += -offset % ALIGN
        end = offset + math.prod(shape) * dtype.itemsize
        if end > len(body):
            raise FrameError(f"array {name!r} {shape} {dtype} ends at byte {end} of a body of {len(body)} bytes")
        arrays[name] = body[offset:end].view(dtype).reshape(shape)
        offset = end
    if offset != len(body):
        raise FrameError(f"the arrays fill {offset} of the body's {len(body)} bytes")
    return Frame(kind, facts, arrays)


def _check_dtype(name: str, dtype: np.dtype) -> None:
    if dtype.kind not in "biuf":
        raise FrameError(f"array {name!r} has the type {dtype}; only numeric and boolean arrays are supported")


def _check_sizes(header_bytes: int, body_bytes: int) -> None:
    if not 0 < header_bytes <= MAX_HEADER_BYTES or body_bytes > MAX_BODY_BYTES:
        raise FrameError(f"a frame of {header_bytes} + {body_bytes} bytes; "
                         f"the limits are 1 to {MAX_HEADER_BYTES}, and {MAX_BODY_BYTES}")
