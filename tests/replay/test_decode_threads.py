"""Batches are decompressed by several threads, and none of them changes a bit."""

import threading

import numpy as np
import pytest
import torch
import zstandard
from replay_twin import Twin, layout_for, play

from qfleet.replay.chunker import Chunker
from qfleet.replay.config import ReplayConfig
from qfleet.replay.gather import WORTH_A_THREAD
from qfleet.replay.host import HostReplay
from qfleet.types import Window


def played(threads):
    layout = layout_for(Window(past=1, unroll=2, future=2), 10)
    cfg = ReplayConfig(capacity=1000, min_steps=0, samples_per_insert=1e9, alpha=0.6)
    replay, twin = HostReplay(layout, cfg, 1, torch.device("cpu"), threads), Twin(3, seed=5)
    play(twin, Chunker(layout, 3), replay, 200)
    return replay


def test_several_threads_decode_the_same_windows():
    alone, many, busy = played(1), played(3), set()
    fill = many._gatherer._fill

    def watched(*args):
        busy.add(threading.get_ident())
        fill(*args)

    many._gatherer._fill = watched
    for n in (1, WORTH_A_THREAD - 1, 2 * WORTH_A_THREAD, 5 * WORTH_A_THREAD + 3):
        first, second = alone.sample(n), many.sample(n)
        assert np.array_equal(first.keys, second.keys) and first.rows.keys() == second.rows.keys()
        for name, values in first.rows.items():
            assert torch.equal(values, second.rows[name]), name
        if n < 2 * WORTH_A_THREAD:
            assert busy == {threading.get_ident()}, "so few windows are not handed over"
    assert len(busy) > 1


def test_what_a_thread_cannot_decode_is_raised_where_the_batch_was_asked_for():
    replay = played(3)
    held = replay._data["obs.image"]
    half = sum(map(bool, held)) // 2  # windows are decoded in the order of slots: the first thread meets nothing bad
    held[half:] = [b"" for _ in held[half:]]
    with pytest.raises(zstandard.ZstdError):
        replay.sample(5 * WORTH_A_THREAD)
