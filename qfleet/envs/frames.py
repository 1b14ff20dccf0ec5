"""Named arrays over a pipe: length-prefixed frames, a JSON header and raw bytes; nothing is ever unpickled.

    magic 4s | header bytes u32 | body bytes u64 | header (JSON, padded) | body (arrays, each from a multiple of 16)
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
    """What came through the pipe is not a frame, or not the one that was due."""


@dataclass(frozen=True)
class Frame:
    """One message: what it is, small facts as JSON, and arrays of numbers."""

    kind: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)


def encode(frame: Frame) -> bytes:
    """The bytes of a frame. Arrays of anything but numbers and booleans are refused."""
    entries, pieces, size = [], [], 0
    for name, value in frame.arrays.items():
        array = np.asarray(value, order="C")
        _check_dtype(name, array.dtype)
        gap = -size % ALIGN
        pieces += [bytes(gap), array.tobytes()]
        size += gap + array.nbytes
        entries.append([name, array.dtype.str, list(array.shape)])
    header = json.dumps({"kind": frame.kind, "facts": dict(frame.facts), "arrays": entries}).encode()
    header += b" " * (-len(header) % ALIGN)  # the body lands aligned in the reader's memory
    _check_sizes(len(header), size)
    return b"".join([PREFIX.pack(MAGIC, len(header), size), header, *pieces])


class FrameDecoder:
    """Puts frames together from reads of any size.

    Read into `space`, then tell `advance` how many bytes came; it returns the frame when it is whole. The arrays
    are views of memory that belongs to that frame alone, so they may be kept and written to.
    """

    def __init__(self) -> None:
        self._sizes: tuple[int, int] | None = None  # of header and body, once the prefix is read
        self._space = memoryview(bytearray(PREFIX.size))
        self._filled = 0

    @property
    def buffer(self) -> memoryview:
        return self._space[self._filled:]

    @property
    def partial(self) -> bool:
        """Whether a frame has begun and is not whole."""
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
        raise FrameError(f"unreadable header {header[:200]!r}: kind must be a text and facts a mapping")
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
        raise FrameError(f"array {name!r} has the type {dtype}; only numbers and booleans travel")


def _check_sizes(header_bytes: int, body_bytes: int) -> None:
    if not 0 < header_bytes <= MAX_HEADER_BYTES or body_bytes > MAX_BODY_BYTES:
        raise FrameError(f"a frame of {header_bytes} + {body_bytes} bytes; "
                         f"the limits are 1 to {MAX_HEADER_BYTES}, and {MAX_BODY_BYTES}")
