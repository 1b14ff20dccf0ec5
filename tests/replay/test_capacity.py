"""`replay.capacity` counts environment steps, even if chunks end with short episodes."""

import io
import itertools
import logging

import numpy as np
import pytest
import replay_twin
import torch
from replay_twin import Twin, append, layout_for, place, play, replay_for

from qfleet.core.env import OBS_PREFIX
from qfleet.core.replay import Window
from qfleet.replay.chunker import Chunker
from qfleet.replay.memory_plan import fixed_bytes, slot_count

SEQUENCES = [Window(unroll=20, future=3, stride=20), Window(past=3, unroll=8, future=2, stride=4),
             Window(past=2, unroll=1, future=1, stride=1)]
"""Windows within one episode, for chunks of 20 steps; episodes of the twin have about six steps."""


def short_episodes(window, steps=400, seed=0, capacity=300, **cfg):
    layout, twin = layout_for(window, 20), Twin(2, seed, end_chance=0.2)
    chunker, replay = Chunker(layout, 2), replay_for(layout, seed, capacity=capacity, **cfg)
    play(twin, chunker, replay, steps)
    return layout, twin, chunker, replay


def trained(replay, layout):
    """Keys of the rows that are trained by some window in the replay."""
    past, found = layout.window.past, set()
    replay.clock.count_steps(1)
    for _ in range(40):
        rows = replay.sample(64).rows
        part = slice(past, past + layout.window.unroll)
        found |= set(rows["row"][:, part][~rows["last"][:, part]].tolist())
    return found


def restored(layout, replay, **cfg):
    state, files = replay.state_dict(), {s.name: b"".join(s.blocks()) for s in replay.segments()}
    other = replay_for(layout, 99, **cfg)
    other.load_state_dict(state)
    other.load_segments((name, io.BytesIO(data)) for name, data in files.items())
    other.check_valid()
    return other


@pytest.mark.parametrize("window", SEQUENCES)
def test_the_store_holds_as_many_steps_as_the_capacity(window):
    layout, twin, _, replay = short_episodes(window)
    rows = trained(replay, layout)
    stored_steps = len(rows)
    assert 300 - layout.chunk_steps < stored_steps <= 300
    assert replay.metrics()["replay/steps"] == stored_steps, "every stored step is counted exactly once"
    assert not any(twin.rows[lane][t].last for lane, t in map(place, rows))
    newest = {lane: max(t for each, t in map(place, rows) if each == lane) for lane in (0, 1)}
    played = sum(not row.last for lane, t in newest.items() for row in twin.rows[lane][:t + 1])
    assert played > 2 * stored_steps, "older steps were evicted"
    replay.check_valid()


def test_windows_equal_the_twin_before_and_after_the_store_grows():
    layout, twin, chunker, replay = short_episodes(SEQUENCES[1], steps=20)
    before = replay._slots
    for _ in range(12):
        play(twin, chunker, replay, 20)
        sample = replay.sample(32)
        for item in range(32):
            past = layout.window.past
            lane, t = place(int(sample.rows["row"][item, past]))
            for name in ("image", "vector"):
                np.testing.assert_array_equal(sample.rows[OBS_PREFIX + name][item, past], twin.stacked(name, lane, t))
            assert sample.rows["action"][item, past] == twin.rows[lane][t].action
            assert torch.equal(
                sample.rows["state"][item], sample.rows["row"][item, list(layout.state_rows), None].expand(-1, 2)
            )
        replay.check_valid()
    assert replay._slots > before == slot_count(layout, replay._cfg)
    assert replay.nbytes >= sum(fixed_bytes(layout, replay._slots))


def test_priorities_and_keys_survive_growth():
    _, twin, chunker, replay = short_episodes(SEQUENCES[1], steps=20, alpha=1.0)
    keys = np.unique(replay.sample(16).keys)
    given = dict(zip(keys.tolist(), np.linspace(2.0, 3.0, len(keys)).tolist(), strict=True))
    replay.update(keys, np.array(list(given.values())))
    before = replay._slots
    play(twin, chunker, replay, 60)
    state = replay.state_dict()
    assert replay._slots > before and state["first"] == 0, "the store grew and evicted nothing"
    for key, priority in given.items():
        assert state["leaves"][key] == priority
    replay.update(keys[:1], np.array([1e6]))
    assert (replay.sample(64).keys == keys[0]).mean() > 0.9


@pytest.mark.parametrize("steps", [40, 150, 300])
def test_a_restored_replay_has_as_many_slots_and_continues_bitwise(steps):
    layout, twin, chunker, one = short_episodes(SEQUENCES[0], steps=steps, alpha=0.6)
    two = restored(layout, one, capacity=300, alpha=0.6)
    assert two.metrics() == one.metrics()
    for _ in range(80):
        one.clock.count_steps(2), two.clock.count_steps(2)
        for _, chunk in append(chunker, twin):
            assert one.add(chunk) == two.add(chunk)
        a, b = one.sample(8), two.sample(8)
        np.testing.assert_array_equal(a.keys, b.keys)
        assert torch.equal(a.weight, b.weight) and all(torch.equal(a.rows[name], b.rows[name]) for name in a.rows)
        priority = twin.rng.random(8)
        one.update(a.keys, priority), two.update(b.keys, priority)
    assert one.metrics() == two.metrics()


def test_another_capacity_keeps_the_newest_steps():
    layout, _, _, replay = short_episodes(SEQUENCES[0])
    small = restored(layout, replay, capacity=100)
    assert 80 < small.metrics()["replay/steps"] <= 100
    assert small.state_dict()["next"] == replay.state_dict()["next"]
    assert trained(small, layout) < trained(replay, layout)
    assert restored(layout, replay, capacity=900).metrics()["replay/steps"] == replay.metrics()["replay/steps"]


def test_a_checkpoint_without_chunk_lengths_can_be_loaded():
    layout, _, _, replay = short_episodes(SEQUENCES[0], steps=40)
    state = {name: value for name, value in replay.state_dict().items() if name not in ("lengths", "slots", "capacity")}
    other = replay_for(layout, 99, capacity=300)
    other.load_state_dict(state)
    other.load_segments((s.name, io.BytesIO(b"".join(s.blocks()))) for s in replay.segments())
    other.check_valid()
    kept = min(replay.state_dict()["next"], slot_count(layout, replay._cfg))
    assert len(other.state_dict()["lengths"]) == kept


def test_impossible_saved_counts_are_refused():
    layout, _, _, replay = short_episodes(SEQUENCES[0], steps=40)
    state = replay.state_dict()
    for wrong in ({"slots": 10**12}, {"lengths": state["lengths"][1:]}, {"lengths": state["lengths"] * 0}):
        with pytest.raises(ValueError, match="saved replay"):
            replay_for(layout, capacity=300).load_state_dict(state | wrong)


def test_growth_stops_at_max_bytes_with_a_warning(caplog):
    _, twin, chunker, unlimited = short_episodes(SEQUENCES[0], steps=20)
    while unlimited.state_dict()["next"] < 15 and len(twin.rows[0]) < 200:
        play(twin, chunker, unlimited, 1)
    limit = unlimited.nbytes + 100
    with caplog.at_level(logging.WARNING):
        _, _, _, replay = short_episodes(SEQUENCES[0], max_bytes=limit)
    assert replay._slots == unlimited._slots == 15 and replay.nbytes <= limit
    assert "holds only about" in caplog.text and caplog.text.count("replay.max_bytes") == 1
    replay.check_valid()


def test_a_larger_max_bytes_holds_more_steps():
    layout, _, _, unlimited = short_episodes(SEQUENCES[0])
    fixed, stored_steps = sum(fixed_bytes(layout, 15)), []
    for factor in (3, 4, 5, 6, 8, 100):
        _, _, _, replay = short_episodes(SEQUENCES[0], max_bytes=factor * fixed + 40_000)
        assert replay.nbytes <= factor * fixed + 40_000
        stored_steps.append(replay.metrics()["replay/steps"])
    assert stored_steps[-1] == unlimited.metrics()["replay/steps"] and stored_steps[-1] > 1.5 * stored_steps[0]
    assert all(more > less - layout.chunk_steps for less, more in itertools.pairwise(stored_steps)), stored_steps


def test_a_device_store_does_not_grow_and_warns(caplog):
    replay_twin.chosen["store"] = "device"
    try:
        with caplog.at_level(logging.WARNING):
            layout, _, _, replay = short_episodes(SEQUENCES[0])
    finally:
        replay_twin.chosen["store"] = "host"
    state, stored_steps = replay.state_dict(), replay.metrics()["replay/steps"]
    assert state["next"] - state["first"] == slot_count(layout, replay._cfg) == 15
    assert stored_steps == len(trained(replay, layout)) < 150
    assert "use replay.store=host" in caplog.text
    replay.check_valid()


def test_chunks_of_continuous_streams_count_as_full():
    layout, twin = layout_for(Window(future=3), 20), Twin(2, 0, end_chance=0.2)
    chunker, replay = Chunker(layout, 2), replay_for(layout, capacity=300)
    play(twin, chunker, replay, 400)
    assert replay.metrics()["replay/steps"] == 300 and replay._slots == 15
