"""Stored chunks as immutable files: groups of consecutive serials.

    "QFSG" version:u16 chunks:u32 first serial:u64 | then per chunk, little-endian: length:u64, packed chunk
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

from qfleet.core.replay import Segment
from qfleet.replay.codec import PackedChunk
from qfleet.replay.layout import Layout

CHUNKS_PER_SEGMENT = 64
"""Chunks per segment, about a megabyte of Atari."""

MAGIC = b"QFSG"
VERSION = 1
_HEAD = struct.Struct("<4sHIQ")
_LENGTH = struct.Struct("<Q")

SegmentSource = str | os.PathLike[str] | BinaryIO
"""Where a segment's bytes come from: a file's path, or anything that can be read."""


def split_segments(
    first: int, stop: int, packed: Callable[[int], PackedChunk], prints: Callable[[int], int]
) -> list[Segment]:
    """Segments of the chunks first..stop-1. Borders lie at multiples of GROUP, so full groups never change.

    A name holds the serials inside, so that a tail that grew, or a head that lost chunks, is another segment. It ends
    with a checksum of the chunks' own (`prints`): a run that resumed from an older checkpoint counts the same serials
    again, with other contents.
    """
    borders = [first, *range((first // CHUNKS_PER_SEGMENT + 1) * CHUNKS_PER_SEGMENT, stop, CHUNKS_PER_SEGMENT), stop]
    pairs = pairwise(borders) if first < stop else ()
    return [Segment(_name(begin, end, prints), partial(_blocks, begin, end, packed)) for begin, end in pairs]


def _name(first: int, stop: int, prints: Callable[[int], int]) -> str:
    inside = b"".join(struct.pack("<I", prints(serial)) for serial in range(first, stop))
    return f"replay-{first:012d}-{stop - 1:012d}-{zlib.crc32(inside):08x}"


def _blocks(first: int, stop: int, packed: Callable[[int], PackedChunk]) -> Iterator[bytes]:
    yield _HEAD.pack(MAGIC, VERSION, stop - first, first)
    for serial in range(first, stop):
        data = packed(serial).to_bytes()
        yield _LENGTH.pack(len(data)) + data


def read_segments(pieces: Iterable[tuple[str, SegmentSource]], layout: Layout) -> Iterator[tuple[int, PackedChunk]]:
    """(serial, chunk) of all segments, one after the other; malformed ones raise ValueError with their name."""
    for name, source in pieces:
        data = Path(source).read_bytes() if isinstance(source, (str, os.PathLike)) else source.read()
        try:
            yield from _parse(data, layout)
        except ValueError as error:
            raise ValueError(f"replay segment {name}: {error}") from None


def _parse(data: bytes, layout: Layout) -> Iterator[tuple[int, PackedChunk]]:
    if len(data) < _HEAD.size:
        raise ValueError(f"{len(data)} bytes are too few for a segment")
    magic, version, count, first = _HEAD.unpack_from(data)
    if magic != MAGIC or version != VERSION:
        raise ValueError(f"it begins with {magic!r} version {version} instead of {MAGIC!r} version {VERSION}")
    at = _HEAD.size
    for serial in range(first, first + count):
        if len(data) - at < _LENGTH.size:
            raise ValueError(f"it ends before chunk {serial}")
        length, = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if length > len(data) - at:
            raise ValueError(f"it ends within chunk {serial}")
        yield serial, PackedChunk.from_bytes(data[at:at + length], layout)
        at += length
    if at != len(data):
        raise ValueError(f"{len(data) - at} bytes follow its last chunk")
