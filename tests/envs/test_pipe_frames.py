"""Frames: what is written comes back bit by bit, however the reads fall; anything else is refused by name."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from qfleet.envs.pipe_frames import MAGIC, MAX_BODY_BYTES, PREFIX, Frame, FrameDecoder, FrameError, encode

DTYPES = st.sampled_from(["<f4", "<f8", "|b1", "|u1", "<i2", "<i4", "<i8", "<u8"])
ARRAYS = arrays.arrays(DTYPES, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))


def assemble(data: bytes, sizes: list[int]) -> list[Frame]:
    """Feed `data` in reads of at most `sizes` bytes, in turn."""
    assembly, frames, offset, turn = FrameDecoder(), [], 0, 0
    while offset < len(data):
        take = min(sizes[turn % len(sizes)], len(assembly.buffer), len(data) - offset)
        assembly.buffer[:take] = data[offset:offset + take]
        frame = assembly.advance(take)
        offset, turn = offset + take, turn + 1
        if frame is not None:
            frames.append(frame)
    assert not assembly.partial
    return frames


def framed(header: bytes, body: bytes = b"") -> bytes:
    return PREFIX.pack(MAGIC, len(header), len(body)) + header + body


def header(entries: object, kind: object = "k", facts: object = None) -> bytes:
    return json.dumps({"kind": kind, "facts": {} if facts is None else facts, "arrays": entries}).encode()


@given(st.lists(st.dictionaries(st.text(max_size=5), ARRAYS, max_size=4), min_size=1, max_size=3),
       st.lists(st.integers(1, 70), min_size=1, max_size=5))
def test_frames_survive_any_cutting_of_the_stream(contents, sizes):
    sent = [Frame(f"kind {i}", {"n": i, "text": "ä"}, content) for i, content in enumerate(contents)]
    got = assemble(b"".join(encode(frame) for frame in sent), sizes)
    assert [(f.kind, f.facts) for f in got] == [(f.kind, f.facts) for f in sent]
    for a, b in zip(sent, got, strict=True):
        assert list(a.arrays) == list(b.arrays)
        for name, array in a.arrays.items():
            twin = b.arrays[name]
            assert (twin.dtype, twin.shape, twin.tobytes()) == (array.dtype, array.shape, array.tobytes())
            assert twin.flags.aligned and twin.flags.writeable


def test_strided_arrays_travel_as_their_values():
    array = np.arange(24, dtype=np.float32).reshape(4, 6)[::-2, ::3]
    (frame,) = assemble(encode(Frame("k", arrays={"a": array})), [1000])
    np.testing.assert_array_equal(frame.arrays["a"], array)


def test_arrays_of_one_frame_are_not_overwritten_by_the_next():
    first, second = assemble(b"".join(encode(Frame("k", arrays={"a": np.full(9, i)})) for i in (1, 2)), [1000])
    assert (first.arrays["a"] == 1).all() and (second.arrays["a"] == 2).all()


@pytest.mark.parametrize("value", [np.array([object()]), np.array(["text"]), np.zeros(2, "M8[s]"), np.zeros(2, "c8"),
                                   np.zeros(2, [("a", "f4")])])
def test_only_numbers_travel(value):
    with pytest.raises(FrameError, match="'a' has the type"):
        encode(Frame("k", arrays={"a": value}))


@pytest.mark.parametrize(("data", "message"), [
    (b"Hello from the pygame community", "not a frame: it begins with b'Hello"),
    (PREFIX.pack(MAGIC, 1 << 30, 0), "limits"),
    (PREFIX.pack(MAGIC, 0, 0), "limits"),
    (PREFIX.pack(MAGIC, 16, MAX_BODY_BYTES + 1), "limits"),
    (framed(b"{not json"), "unreadable header"),
    (framed(b"[1]"), "unreadable header"),
    (framed(b'{"kind": "k", "facts": {}}'), "unreadable header"),
    (framed(b"\xff\xfe"), "unreadable header"),
    (framed(header([], kind=3)), "kind must be"),
    (framed(header([], facts=[1])), "facts a mapping"),
    (framed(header([["a", "no such type", [1]]])), "unreadable header"),
    (framed(header([["a", "O", [1]]]), bytes(8)), "only numeric"),
    (framed(header([["a", "<f4", [-1, -1]]]), bytes(4)), r"the shape \(-1, -1\)"),
    (framed(header([["a", "<f4", [3]]]), bytes(8)), "ends at byte 12 of a body of 8"),
    (framed(header([["a", "<f4", [1 << 62]]]), bytes(8)), "ends at byte"),
    (framed(header([["a", "<f4", [1]]]), bytes(8)), "fill 4 of the body's 8"),
])
def test_nonsense_is_named(data, message):
    with pytest.raises(FrameError, match=message):
        assemble(data, [1000])
