"""Chunks that do not decode are dropped and counted on arrival: from another process or from a checkpoint."""

import io

import pytest
import torch
from corrupt_chunks import corrupt_chunks
from replay_twin import Twin, append, layout_for

from qfleet.core.replay import Window
from qfleet.replay.chunker import Chunker
from qfleet.replay.codec import Codec
from qfleet.replay.config import ReplayConfig
from qfleet.replay.device_store import DeviceReplay
from qfleet.replay.host_store import HostReplay
from qfleet.replay.redistribute import redistribute

LAYOUT = layout_for(Window(future=2), 40)
CPU = torch.device("cpu")
STORES = {"host": lambda cfg: HostReplay(LAYOUT, cfg, 1, CPU), "host, 3 threads": lambda cfg: HostReplay(
    LAYOUT, cfg, 1, CPU, threads=3), "device": lambda cfg: DeviceReplay(LAYOUT, cfg, 1, CPU)}
KINDS = ["two frames", "overwritten", "truncated", "bytes after the frame", "continued in the next block",
         "a window of 2 GiB"]


@pytest.fixture(params=STORES)
def make(request, monkeypatch):
    """Factory of empty stores of each kind; parts are small, so that all threads decode."""
    monkeypatch.setattr("qfleet.replay.decode.PART_BYTES", 20_000)
    cfg = ReplayConfig(capacity=400, min_steps=0, samples_per_insert=1e9, alpha=0.6, chunk_steps=40)
    return lambda: STORES[request.param](cfg)


def chunks(count):
    twin, chunker, found = Twin(1, 3), Chunker(LAYOUT, 1), []
    while len(found) < count:
        found += [chunk for _, chunk in append(chunker, twin)]
    return [Codec(LAYOUT).pack(chunk) for chunk in found[:count]]


def sampled_serials(replay, count=20):
    """Serials of the chunks in many samples; enough to include every chunk."""
    serials = set()
    replay.clock.count_steps(1)
    for _ in range(count):
        serials |= set((replay.sample(64).keys // LAYOUT.starts).tolist())
    replay.check_valid()
    return serials


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_chunk_that_does_not_decode_is_dropped_and_counted(make, kind):
    replay, (one, two) = make(), chunks(2)
    replay.clock.count_steps(80)
    assert replay.add_packed(one) == 0
    assert "replay/dropped_chunks" not in replay.metrics()
    assert replay.add_packed(corrupt_chunks(LAYOUT, two)[kind]) is None
    assert replay.add_packed(two) == 1
    assert sampled_serials(replay) == {0, 1}
    assert replay.metrics()["replay/dropped_chunks"] == 1


def saved_with_corrupt_chunk(monkeypatch):
    """State and segments of a store without checks on arrival: three chunks, the second does not decode."""
    replay, (one, two, three) = STORES["host"](ReplayConfig(
        capacity=400, min_steps=0, samples_per_insert=1e9, alpha=0.6, chunk_steps=40)), chunks(3)
    with monkeypatch.context() as patch:
        patch.setattr(HostReplay, "_from_packed", lambda self, packed: packed)
        replay.clock.count_steps(120)
        for packed in (one, corrupt_chunks(LAYOUT, two)["overwritten"], three):
            replay.add_packed(packed)
    return replay.state_dict(), {segment.name: b"".join(segment.blocks()) for segment in replay.segments()}


def segments(files):
    return [(name, io.BytesIO(data)) for name, data in files.items()]


def test_a_checkpoint_with_a_chunk_that_does_not_decode_resumes_without_it(make, monkeypatch):
    state, files = saved_with_corrupt_chunk(monkeypatch)
    replay = make()
    replay.load_state_dict(state)
    replay.load_segments(segments(files))
    assert replay.metrics()["replay/dropped_chunks"] == 1
    assert sampled_serials(replay) == {0, 2}
    again = make()  # the next checkpoint is intact
    again.load_state_dict(replay.state_dict())
    again.load_segments(segments({segment.name: b"".join(segment.blocks()) for segment in replay.segments()}))
    assert sampled_serials(again) == {0, 2} and again.metrics()["replay/dropped_chunks"] == 1


def test_redistribution_drops_a_chunk_that_does_not_decode(make, monkeypatch):
    state, files = saved_with_corrupt_chunk(monkeypatch)
    replay = make()
    redistribute(replay, [(state, segments(files))], 0, 1, 120)
    assert sampled_serials(replay) == {0, 1}
    assert replay.metrics()["replay/dropped_chunks"] == 1


def test_a_blank_chunk_has_no_valid_starts_and_counts_as_one_step():
    """With windows within an episode, chunks count by their trained rows."""
    layout = layout_for(Window(past=3, unroll=8, future=2, stride=4), 20)
    blank = layout.blank()
    assert not blank.valid.any() and layout.steps_of(blank.columns["last"]) == 1
