"""Segments: immutable checkpoint files of chunks with consecutive serials.

    little-endian: "QFSG" version:u16 chunks:u32 first serial:u64 | then per chunk: length:u64, packed chunk
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
_HEADER = struct.Struct("<4sHIQ")
_LENGTH = struct.Struct("<Q")

SegmentSource = str | os.PathLike[str] | BinaryIO
"""A segment's bytes: the path of a file, or a binary stream."""


def split_segments(
    first: int, stop: int, packed: Callable[[int], PackedChunk], checksum: Callable[[int], int]
) -> list[Segment]:
    """Split the chunks first..stop-1 into segments at multiples of CHUNKS_PER_SEGMENT, so full segments never change.

    A name contains the first and last serial: a tail that grew, or a head that lost chunks, is a new segment. It ends
    with a checksum over the `checksum` of its chunks: a run that resumes from an older checkpoint assigns the same
    serials again, to other contents.
    """
    bounds = [first, *range((first // CHUNKS_PER_SEGMENT + 1) * CHUNKS_PER_SEGMENT, stop, CHUNKS_PER_SEGMENT), stop]
    pairs = pairwise(bounds) if first < stop else ()
    return [Segment(_name(begin, end, checksum), partial(_encode, begin, end, packed)) for begin, end in pairs]


def _name(first: int, stop: int, checksum: Callable[[int], int]) -> str:
    checksums = b"".join(struct.pack("<I", checksum(serial)) for serial in range(first, stop))
    return f"replay-{first:012d}-{stop - 1:012d}-{zlib.crc32(checksums):08x}"


def _encode(first: int, stop: int, packed: Callable[[int], PackedChunk]) -> Iterator[bytes]:
    yield _HEADER.pack(MAGIC, VERSION, stop - first, first)
    for serial in range(first, stop):
        data = packed(serial).to_bytes()
        yield _LENGTH.pack(len(data)) + data


def read_segments(segments: Iterable[tuple[str, SegmentSource]], layout: Layout) -> Iterator[tuple[int, PackedChunk]]:
    """Yield (serial, chunk) of all segments; a malformed segment raises ValueError with its name."""
    for name, source in segments:
        data = Path(source).read_bytes() if isinstance(source, (str, os.PathLike)) else source.read()
        try:
            yield from _parse(data, layout)
        except ValueError as error:
            raise ValueError(f"replay segment {name}: {error}") from None


def _parse(data: bytes, layout: Layout) -> Iterator[tuple[int, PackedChunk]]:
    if len(data) < _HEADER.size:
        raise ValueError(f"{len(data)} bytes are too few for a segment")
    magic, version, count, first = _HEADER.unpack_from(data)
    if magic != MAGIC or version != VERSION:
        raise ValueError(f"it begins with {magic!r} version {version} instead of {MAGIC!r} version {VERSION}")
    at = _HEADER.size
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
