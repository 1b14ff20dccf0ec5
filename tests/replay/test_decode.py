"""Windows of compressed columns equal those of a naive reader, for any number of threads."""

import threading

import numpy as np
import pytest
import torch
import zstandard

from qfleet.core.env import EnvSpec, Leaf
from qfleet.core.replay import Chunk, Window
from qfleet.replay import decode
from qfleet.replay.config import ReplayConfig
from qfleet.replay.host_store import HostReplay
from qfleet.replay.layout import Layout

SPEC = EnvSpec("columns", {
    "odd": Leaf((4, 17, 17), "uint8", "image", stack=4),  # 289 bytes per row: not a multiple of a word
    "even": Leaf((2, 16, 16), "uint8", "image", stack=2),
    "plain": Leaf((65,), "float32", "vector"),
}, num_actions=3)
WINDOWS = [Window(), Window(future=3), Window(past=5, unroll=20, future=2, stride=10)]
KEPT = 12


def chunks_for(layout):
    """Random chunks with many final rows."""
    rng, chunks = np.random.default_rng(3), []
    for _ in range(KEPT):
        columns = {c.name: rng.integers(0, 99, (layout.rows, *c.shape)).astype(c.dtype) for c in layout.columns}
        columns["last"] = rng.random(layout.rows) < 0.2
        chunks.append(Chunk(columns, np.ones(layout.starts, bool)))
    return chunks


def filled(layout, chunks, threads=1):
    cfg = ReplayConfig(capacity=KEPT * layout.chunk_steps, min_steps=0, samples_per_insert=1e9, alpha=0.6,
                       chunk_steps=layout.chunk_steps)
    replay = HostReplay(layout, cfg, 1, torch.device("cpu"), threads)
    for chunk in chunks:
        replay.clock.count_steps(layout.chunk_steps)
        replay.add(chunk, np.random.default_rng(4).random(layout.starts) + 0.1)
    return replay


def stack_at(chunk, column, row):
    """The newest `stack` frames of the row's episode; zeros before its first frame."""
    frames, alive = [], True
    for back in range(column.stack):
        alive = alive and (back == 0 or not chunk.columns["last"][row - back])
        frame = chunk.columns[column.name][row - back]
        frames.insert(0, frame if alive else np.zeros_like(frame))
    return frames[0] if column.stack == 1 else np.concatenate(frames)


@pytest.mark.parametrize("part_bytes", [1, 20_000, decode.PART_BYTES])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("chunk_steps", [10, 40])
@pytest.mark.parametrize("window", WINDOWS)
def test_windows_equal_those_of_a_naive_reader(monkeypatch, window, chunk_steps, threads, part_bytes):
    monkeypatch.setattr(decode, "PART_BYTES", part_bytes)
    layout = Layout(SPEC, window, chunk_steps)
    assert {c.name for c in layout.blocked} == {"obs.odd", "obs.even", "obs.plain"}
    assert layout.blocks > 1 or chunk_steps == 10
    chunks = chunks_for(layout)
    sample = filled(layout, chunks, threads).sample(50)
    for column in layout.blocked:
        for key, found in zip(sample.keys, sample.rows[column.name].numpy(), strict=True):
            first = layout.context + key % layout.starts * window.stride
            wanted = [stack_at(chunks[key // layout.starts], column, first + t) for t in range(window.length)]
            np.testing.assert_array_equal(found, np.stack(wanted))


def test_windows_may_come_in_any_order():
    layout = Layout(SPEC, Window(future=2), 40)
    replay, rng = filled(layout, chunks_for(layout)), np.random.default_rng(0)
    slots, starts = rng.integers(0, KEPT, 60), rng.integers(0, layout.starts, 60)
    order = np.lexsort((starts, slots))
    mixed, sorted_ = replay._gatherer.windows(slots, starts), replay._gatherer.windows(slots[order], starts[order])
    for name, values in sorted_.items():
        assert torch.equal(mixed[name][order], values), name


def test_small_batches_are_decoded_by_the_calling_thread(monkeypatch):
    layout, used = Layout(SPEC, Window(future=2), 40), []
    replay, work = filled(layout, chunks_for(layout), threads=3), decode.Decoder._work

    def watched(self, *args):
        used.append(threading.get_ident())
        work(self, *args)

    monkeypatch.setattr(decode.Decoder, "_work", watched)
    replay.sample(32)
    assert set(used) == {threading.get_ident()}
    monkeypatch.setattr(decode, "PART_BYTES", 20_000)
    replay.sample(32)
    assert len(set(used)) > 1


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("damage", "error"), [(lambda data: b"", ValueError),
                                               (lambda data: b"?" + data[1:], zstandard.ZstdError)])
def test_decoding_errors_are_raised_by_sample(monkeypatch, threads, damage, error):
    monkeypatch.setattr(decode, "PART_BYTES", 20_000)
    layout = Layout(SPEC, Window(future=2), 40)
    replay = filled(layout, chunks_for(layout), threads)
    stored = replay._data["obs.odd"]
    good = list(stored)
    stored[KEPT // 2:] = [damage(data) for data in stored[KEPT // 2:]]  # the first part is intact
    with pytest.raises(error):
        replay.sample(100)
    stored[:] = good
    assert replay.sample(100) is not None, "the threads can be used again"


def test_surplus_bytes_of_a_block_do_not_shift_the_others():
    layout = Layout(SPEC, Window(future=2), 40)
    replay = filled(layout, chunks_for(layout))
    more = zstandard.compress(b"more")
    replay._data["obs.odd"][0] = more + replay._data["obs.odd"][0]
    replay._ends["obs.odd"][0] += len(more)  # the first block has two frames now; its declared size is that of one
    with pytest.raises(ValueError, match="decode to more than"):
        replay._gatherer.windows(np.zeros(4, np.int64), np.arange(4))
