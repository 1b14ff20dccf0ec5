"""Corrupt chunks that pass every check until their blocks are decoded."""

import struct

import numpy as np
import zstandard

from qfleet.replay.codec import PackedChunk, decode_arrays, encode_arrays


def with_blocks(layout, packed, name, blocks):
    """Replace the compressed blocks of one column, as if a faulty actor process had packed the chunk."""
    arrays = dict(decode_arrays(packed.to_bytes()))
    arrays["data." + name] = np.frombuffer(b"".join(blocks), np.uint8)
    arrays["ends." + name] = np.cumsum([len(block) for block in blocks]).astype(np.uint32)
    return PackedChunk.from_bytes(encode_arrays(arrays), layout)


def raw_frame(content, window_log=17, short=0):
    """A zstd frame with one uncompressed block, truncated by `short` bytes."""
    block = struct.pack("<I", len(content) << 3 | 1)[:3] + content
    head = b"\x28\xb5\x2f\xfd" + bytes([2 << 6, (window_log - 10) << 3]) + struct.pack("<I", len(content))
    return (head + block)[:len(head + block) - short]


def corrupt_chunks(layout, packed):
    """Corrupt versions of a chunk, by kind of damage."""
    name, size = "obs.image", layout.block_rows * layout.blocked[0].row_bytes
    good = [bytes(packed.blocked[name][block]) for block in range(layout.blocks)]
    frame = raw_frame(bytes(size))
    intact = zstandard.compress((np.arange(size) ** 2 % 97 % 7).astype(np.uint8).tobytes())
    overwritten = intact[:len(intact) // 2] + bytes(len(intact) - len(intact) // 2)
    inner = zstandard.compress(bytes(layout.rows_of_block(1) * layout.blocked[0].row_bytes))
    split = raw_frame(bytes(size), short=len(inner))  # its last bytes are in the next block
    return {label: with_blocks(layout, packed, name, [block, *(rest or good[1:])]) for label, block, rest in [
        ("two frames", good[0] + zstandard.compress(b"more"), None), ("overwritten", overwritten, None),
        ("truncated", frame[:-1], None), ("bytes after the frame", good[0] + b"\x28\xb5", None),
        ("continued in the next block", split, [inner + inner, *good[2:]]),
        ("a window of 2 GiB", raw_frame(bytes(size), 31), None)]}
