"""Chunks that pass for sound until their blocks are decoded."""

import struct

import numpy as np
import zstandard

from qfleet.core import array_codec
from qfleet.replay.codec import PackedChunk


def with_blocks(layout, packed, name, blocks):
    """The same chunk with other blocks of one column, as it would arrive from a member that packs badly."""
    arrays = dict(array_codec.from_bytes(packed.to_bytes()))
    arrays["data." + name] = np.frombuffer(b"".join(blocks), np.uint8)
    arrays["ends." + name] = np.cumsum([len(block) for block in blocks]).astype(np.uint32)
    return PackedChunk.from_bytes(array_codec.to_bytes(arrays), layout)


def raw_frame(content, window_log=17, short=0):
    """A zstd frame of one block that is not compressed; `short` bytes of it are missing."""
    block = struct.pack("<I", len(content) << 3 | 1)[:3] + content
    head = b"\x28\xb5\x2f\xfd" + bytes([2 << 6, (window_log - 10) << 3]) + struct.pack("<I", len(content))
    return (head + block)[:len(head + block) - short]


def poisoned(layout, packed):
    """By name, chunks that pass for sound until their blocks are decoded."""
    name, size = "obs.image", layout.block_rows * layout.blocked[0].row_bytes
    good = [bytes(packed.blocked[name][block]) for block in range(layout.blocks)]
    frame = raw_frame(bytes(size))
    sound = zstandard.compress((np.arange(size) ** 2 % 97 % 7).astype(np.uint8).tobytes())
    corrupt = sound[:len(sound) // 2] + bytes(len(sound) - len(sound) // 2)
    inner = zstandard.compress(bytes(layout.rows_of_block(1) * layout.blocked[0].row_bytes))
    lent = raw_frame(bytes(size), short=len(inner))  # the next block has its last bytes
    return {label: with_blocks(layout, packed, name, [block, *(rest or good[1:])]) for label, block, rest in [
        ("two frames", good[0] + zstandard.compress(b"more"), None), ("corrupt", corrupt, None),
        ("cut off", frame[:-1], None), ("bytes after the frame", good[0] + b"\x28\xb5", None),
        ("bytes of the next block", lent, [inner + inner, *good[2:]]),
        ("a window of 2 GiB", raw_frame(bytes(size), 31), None)]}
