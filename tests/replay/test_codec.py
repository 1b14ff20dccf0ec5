"""The codec is lossless and refuses malformed data."""

import zlib

import numpy as np
import pytest
import zstandard
from corrupt_chunks import corrupt_chunks, raw_frame, with_blocks
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_twin import Twin, append, layout_for

from qfleet.core.replay import Window
from qfleet.replay.chunker import Chunker
from qfleet.replay.codec import FORMAT_VERSION, MAGIC, Codec, PackedChunk, decode_arrays, encode_arrays


def some_chunk(layout, seed=0):
    twin, chunker = Twin(1, seed), Chunker(layout, 1)
    while True:
        for _, chunk in append(chunker, twin):
            return chunk


@given(st.integers(1, 40), st.integers(1, 5), st.integers(0, 2**16))
@settings(deadline=None, max_examples=40)
def test_decoding_undoes_encoding(chunk_steps, future, seed):
    layout = layout_for(Window(future=future), chunk_steps)
    chunk, codec = some_chunk(layout, seed), Codec(layout)
    packed = PackedChunk.from_bytes(codec.pack(chunk).to_bytes(), layout)
    again = codec.unpack(packed)
    assert list(again.columns) == list(chunk.columns)
    for name, values in chunk.columns.items():
        assert again.columns[name].dtype == values.dtype
        np.testing.assert_array_equal(again.columns[name], values)
    np.testing.assert_array_equal(again.valid, chunk.valid)


def test_only_wide_columns_are_compressed():
    layout = layout_for(Window(), 16)
    packed = Codec(layout).pack(some_chunk(layout))
    assert set(packed.blocked) == {"obs.image", "obs.wide"}
    assert {"action", "reward", "discount", "last", "row", "state", "obs.small", "obs.vector"} == set(packed.dense)


@given(st.data())
@settings(deadline=None, max_examples=100)
def test_damaged_bytes_raise_value_error(data):
    layout = layout_for(Window(), 8)
    good = Codec(layout).pack(some_chunk(layout)).to_bytes()
    kind = data.draw(st.sampled_from(["cut", "flip", "grow", "noise"]))
    if kind == "cut":
        bad = good[:data.draw(st.integers(0, len(good) - 1))]
    elif kind == "flip":
        at = data.draw(st.integers(0, len(good) - 1))
        bad = good[:at] + bytes([good[at] ^ data.draw(st.integers(1, 255))]) + good[at + 1:]
    elif kind == "grow":
        bad = good + b"\0"
    else:
        bad = data.draw(st.binary(max_size=200))
    with pytest.raises(ValueError):
        PackedChunk.from_bytes(bad, layout)


@given(st.binary(max_size=120), st.integers(0, 4))
@settings(deadline=None, max_examples=300)
def test_malformed_frames_with_a_correct_checksum_raise_value_error(body, count):
    head = MAGIC + FORMAT_VERSION.to_bytes(2, "little") + count.to_bytes(2, "little")
    data = head + zlib.crc32(body).to_bytes(4, "little") + body
    if count == 0 and body == b"":
        assert decode_arrays(data) == {}
        return
    try:
        decode_arrays(data)
    except ValueError:
        return
    pytest.fail("random bytes were read as arrays")


def test_chunks_of_another_layout_or_with_wrong_block_sizes_are_refused():
    layout = layout_for(Window(), 8)
    packed = Codec(layout).pack(some_chunk(layout))
    with pytest.raises(ValueError, match="the chunk has another layout"):
        PackedChunk.from_bytes(packed.to_bytes(), layout_for(Window(future=2), 8))
    arrays = dict(decode_arrays(packed.to_bytes()))
    del arrays["dense.reward"]
    with pytest.raises(ValueError, match="the chunk has the columns"):
        PackedChunk.from_bytes(encode_arrays(arrays), layout)
    bomb = zstandard.ZstdCompressor().compress(bytes(10**7))
    arrays = dict(decode_arrays(packed.to_bytes()))
    arrays["data.obs.image"] = np.frombuffer(bomb, np.uint8)
    arrays["ends.obs.image"] = np.array([len(bomb)], np.uint32)
    assert layout.blocks == 1
    with pytest.raises(ValueError, match="declares 10000000 bytes"):
        PackedChunk.from_bytes(encode_arrays(arrays), layout)
    arrays["data.obs.image"] = np.frombuffer(b"not zstd", np.uint8)
    arrays["ends.obs.image"] = np.array([8], np.uint32)
    with pytest.raises(ValueError, match="not zstd"):
        PackedChunk.from_bytes(encode_arrays(arrays), layout)


def test_verify_finds_blocks_that_do_not_decode_to_their_rows():
    layout = layout_for(Window(), 40)
    codec, packed = Codec(layout), Codec(layout).pack(some_chunk(layout))
    assert layout.blocks > 2
    codec.verify(packed)
    sizes = [layout.rows_of_block(block) * layout.blocked[0].row_bytes for block in range(layout.blocks)]
    codec.verify(with_blocks(layout, packed, "obs.image", [raw_frame(bytes(size)) for size in sizes]))
    for label, bad in corrupt_chunks(layout, packed).items():
        for read in (codec.verify, codec.unpack):
            with pytest.raises(ValueError, match=r"block 0 of obs\.image"):
                read(bad)
                pytest.fail(label)


def test_verify_finds_compressed_floats_that_are_not_finite():
    layout = layout_for(Window(), 40)
    codec, chunk = Codec(layout), some_chunk(layout)
    chunk.columns["obs.wide"][7, 3] = np.nan
    with pytest.raises(ValueError, match=r"obs\.wide of the chunk is not finite"):
        codec.verify(codec.pack(chunk))


def test_arrays_of_objects_are_refused():
    with pytest.raises(ValueError, match="dtype"):
        encode_arrays({"x": np.array([object()])})
