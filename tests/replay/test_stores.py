"""Host and device replay compared with the naive twin, and with invalid input."""

import io

import numpy as np
import pytest
import replay_twin
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_twin import LANE, SPEC, Twin, append, key, layout_for, place, play, replay_for

from qfleet.core.env import OBS_PREFIX
from qfleet.core.errors import UserError
from qfleet.core.replay import Window
from qfleet.maths.bellman import n_step
from qfleet.replay.chunker import Chunker


@pytest.fixture(scope="module", params=["host", "device"], autouse=True)
def store(request):
    """Run every test of this file with every store."""
    replay_twin.chosen["store"] = request.param
    yield request.param
    replay_twin.chosen["store"] = "host"


def compare_window(sample, item, twin, layout):
    """Assert that a sampled window equals the twin's rows up to its first final row, with stacked observations and
    the states of `state_rows`. Return lane and t of the first trained row."""
    past = layout.window.past
    lane, t = place(int(sample.rows["row"][item, past]))
    state_keys = sample.rows["row"][item, list(layout.state_rows)]
    assert torch.equal(sample.rows["state"][item], state_keys[:, None].repeat(1, 2))
    for row in range(-past, layout.window.length - past):
        if not sample.rows["row"][item, past + row]:  # padding before the episode, or after it
            assert sample.rows["last"][item, past + row] and not sample.rows["obs.image"][item, past + row].any()
            continue
        true = twin.rows[lane][t + row]
        assert sample.rows["action"][item, past + row] == true.action
        assert bool(sample.rows["last"][item, past + row]) == true.last
        assert sample.rows["reward"][item, past + row] == np.float32(true.reward)
        assert sample.rows["discount"][item, past + row] == true.discount
        for name in SPEC.observation:
            stacked = sample.rows[OBS_PREFIX + name][item, past + row].numpy()
            np.testing.assert_array_equal(stacked, twin.stacked(name, lane, t + row))
        if true.last:
            break
    return lane, t


@given(st.integers(1, 4), st.integers(1, 20), st.integers(0, 2**16), st.sampled_from([0.0, 0.7]), st.integers(2, 90))
@settings(deadline=None, max_examples=20)
def test_windows_equal_the_twin(future, chunk_steps, seed, alpha, steps):
    layout, twin = layout_for(Window(future=future), max(chunk_steps, future)), Twin(2, seed)
    chunker, replay = Chunker(layout, 2), replay_for(layout, seed, capacity=100, alpha=alpha)
    play(twin, chunker, replay, steps)
    replay.check_valid()
    replay.clock.count_steps(1)
    sample = replay.sample(16)
    if sample is None:
        assert replay.metrics()["replay/size"] == 0
        return
    for item in range(16):
        lane, t = compare_window(sample, item, twin, layout)
        assert not twin.rows[lane][t].last


def test_sequence_windows_equal_the_twin_and_are_padded_after_the_episode():
    layout, twin = layout_for(Window(past=1, unroll=3, future=2, stride=2), 8), Twin(3, seed=4)
    chunker, replay = Chunker(layout, 3), replay_for(layout)
    play(twin, chunker, replay, 80)
    sample = replay.sample(64)
    for item in range(64):
        compare_window(sample, item, twin, layout)
        last = sample.rows["last"][item, 1:]
        assert not last[0]
        assert torch.equal(last.int().cummax(0).values.bool(), last)


@pytest.mark.parametrize("n", [1, 3, 5])
def test_n_step_returns_of_sampled_windows_equal_the_naive_ones(n):
    layout, twin = layout_for(Window(future=n), 16), Twin(4, seed=n, end_chance=0.2)
    chunker, replay = Chunker(layout, 4), replay_for(layout, capacity=4000)
    play(twin, chunker, replay, 600)
    for _, chunk in append(chunker, twin, end=True) + chunker.flush():
        replay.add(chunk)
    drawn = set()
    replay.clock.count_steps(1)
    for _ in range(4):
        rows = replay.sample(1000).rows
        step = n_step(rows["reward"].double(), rows["discount"].double(), rows["last"], 0.9, n)
        for item, start in enumerate(rows["row"][:, 0].tolist()):
            lane, t = place(start)
            ret, discount, boot = twin.n_step(lane, t, n, 0.9)
            assert float(step.ret[item, 0]) == pytest.approx(ret, abs=1e-9)
            assert float(step.discount[item, 0]) == pytest.approx(discount, abs=1e-9)
            if discount:
                row = int(step.row[item, 0])
                assert int(rows["row"][item, row]) == key(lane, boot)
                np.testing.assert_array_equal(rows["obs.image"][item, row], twin.stacked("image", lane, boot))
            drawn.add(start)
    assert len(drawn) > 1000


def filled(alpha=0.6, seed=0, steps=200, **cfg):
    layout, twin = layout_for(Window(), 10), Twin(2, seed)
    chunker, replay = Chunker(layout, 2), replay_for(layout, seed, alpha=alpha, **cfg)
    play(twin, chunker, replay, steps)
    return layout, twin, chunker, replay


def test_uniform_weights_are_exactly_one():
    replay = filled(alpha=0.0)[-1]
    replay.update(replay.sample(8).keys, np.full(8, 100.0))
    sample = replay.sample(32)
    assert torch.equal(sample.weight, torch.ones(32))


def test_float_tensors_of_a_batch_have_a_constant_alignment(store):
    """Rounding in kernels may depend on alignment: 64 bytes on the host, a constant offset on a device."""
    replay, heap, alignment = filled()[-1], [], {}
    for draw in range(40):
        heap.append(bytearray(1000 + 137 * draw))
        size = 1 + draw % 7
        sample = replay.sample(size)
        floats = {"weight": sample.weight} | {name: rows for name, rows in sample.rows.items()
                                              if rows.is_floating_point()}
        offsets = {name: values.data_ptr() % 64 for name, values in floats.items()}
        assert len(offsets) > 2 and alignment.setdefault(size, offsets) == offsets
        assert store == "device" or not any(offsets.values())


def test_samples_follow_priorities_and_weights_correct_for_them():
    replay = filled(alpha=1.0, beta_start=1.0, beta_end=1.0)[-1]
    keys = np.unique(np.concatenate([replay.sample(200).keys for _ in range(20)]))
    wanted = dict(zip(keys.tolist(), np.linspace(1.0, 4.0, len(keys)), strict=True))
    replay.update(keys, np.array(list(wanted.values())))
    replay.check_valid()
    assert len(keys) == replay.metrics()["replay/size"]
    counts, chi, total = dict.fromkeys(wanted, 0), 0.0, 0
    for _ in range(50):
        sample = replay.sample(400)
        priority = np.array([wanted[drawn] for drawn in sample.keys.tolist()])
        np.testing.assert_allclose(sample.weight, priority.min() / priority, rtol=1e-5)
        raw = sum(wanted.values()) / (len(wanted) * priority)  # 1 / (N · P(i)), not divided by the largest
        np.testing.assert_allclose(sample.weight * sample.max_weight, raw, rtol=1e-5)
        total += 400
        for drawn in sample.keys.tolist():
            counts[drawn] += 1
    mass = sum(wanted.values())
    for drawn, value in wanted.items():
        expected = total * value / mass
        chi += (counts[drawn] - expected) ** 2 / expected
    # Stratified samples vary less than independent ones, for which chi is about the number of keys.
    assert chi < 1.3 * len(keys)


def test_importance_weights_follow_beta_on_the_step_clock():
    replay = filled(alpha=0.5, beta_start=0.0, beta_end=1.0, beta_steps=10_000)[-1]
    keys = np.unique(replay.sample(100).keys)
    replay.update(keys[:1], np.array([16.0]))
    sample = replay.sample(500)
    assert replay.metrics()["replay/beta"] == pytest.approx(400 / 10_000)
    touched = sample.keys == keys[0]
    assert touched.any()
    np.testing.assert_allclose(sample.weight[torch.from_numpy(touched)], (1 / 4) ** (400 / 10_000), rtol=1e-6)
    assert (sample.weight[torch.from_numpy(~touched)] == 1).all()


@given(st.lists(st.sampled_from([np.nan, np.inf, -np.inf, -1.0, 0.0, 1e30, 1e-30, 0.5, 7.0]), min_size=1, max_size=30))
@settings(deadline=None, max_examples=25)
def test_priorities_out_of_range_are_clamped_and_counted(values):
    replay = filled(steps=40)[-1]
    keys = replay.sample(len(values)).keys
    replay.update(keys, np.array(values, np.float32))
    replay.check_valid()
    in_range = [0.5, 7.0]
    assert replay.metrics()["replay/clamped_priorities"] == sum(value not in in_range for value in values)
    sample = replay.sample(64)
    assert torch.isfinite(sample.weight).all() and (sample.weight > 0).all() and sample.weight.max() == 1
    assert replay.state_dict()["priorities"]["largest"] == max([1.0, *(v for v in values if v in in_range)])


def test_new_chunks_enter_at_the_largest_priority_seen():
    _, twin, chunker, replay = filled(alpha=1.0)
    replay.update(replay.sample(8).keys, np.full(8, 50.0))
    before = replay.state_dict()["next"]
    play(twin, chunker, replay, 11)
    leaves = replay.state_dict()["leaves"].reshape(-1, 10)
    assert replay.state_dict()["next"] > before
    assert set(leaves[-1]) <= {0.0, 50.0} and 50.0 in leaves[-1]


def test_given_priorities_count_only_for_valid_starts():
    layout, twin = layout_for(Window(), 10), Twin(1, seed=5, end_chance=0.4)
    chunker, replay = Chunker(layout, 1), replay_for(layout, alpha=1.0)
    chunks = [chunk for _ in range(30) for _, chunk in append(chunker, twin)]
    assert not chunks[0].valid.all()
    assert replay.add(chunks[0], np.where(chunks[0].valid, 2.0, np.nan)) == 0
    assert set(replay.state_dict()["leaves"]) == {0.0, 2.0}
    assert replay.metrics()["replay/clamped_priorities"] == 0


def test_stale_keys_are_ignored():
    _, twin, chunker, replay = filled(alpha=1.0, capacity=100)
    old = replay.sample(32).keys
    play(twin, chunker, replay, 60)  # more than the capacity: every chunk has been replaced
    before = replay.state_dict()["leaves"]
    replay.update(old, np.full(32, 1000.0))
    np.testing.assert_array_equal(replay.state_dict()["leaves"], before)
    replay.update(np.array([10**15, -1, -10**15]), np.full(3, 1000.0))
    np.testing.assert_array_equal(replay.state_dict()["leaves"], before)
    assert not set(replay.sample(64).keys.tolist()) & set(old.tolist())
    replay.check_valid()
    with pytest.raises(ValueError, match="keys"):
        replay.update(old, np.ones(3))


def test_priorities_stay_with_their_items_after_the_ring_buffer_wraps():
    """Chunks are also inserted between sampling and updating."""
    layout, twin, chunker, replay = filled(alpha=1.0, capacity=100, steps=400)

    def flatten():
        first, last = (replay.state_dict()[name] * layout.starts for name in ("first", "next"))
        replay.update(np.arange(first, last), np.full(last - first, 1e-3))

    for _ in range(20):
        flatten()
        before = replay.sample(256)
        play(twin, chunker, replay, 7)
        replay.update(before.keys, np.ones(256))
        flatten()
        chosen = int(before.keys.argmax())  # the newest key, which is not evicted yet
        replay.update(before.keys[[chosen]], np.array([1e6]))
        assert set(replay.sample(64).rows["row"][:, 0].tolist()) == {int(before.rows["row"][chosen, 0])}
        replay.check_valid()


def test_capacity_evicts_the_oldest():
    layout, _, _, replay = filled(alpha=0.0, capacity=105, steps=300)
    state = replay.state_dict()
    assert state["next"] - state["first"] == 10 and state["next"] > 50
    for _ in range(10):
        rows = replay.sample(50).rows["row"][:, 0].numpy() % LANE
        assert rows.min() >= 300 - 10 * 10 / 2 - layout.rows
    replay.check_valid()


def test_max_bytes_evicts_the_oldest(store):
    if store == "device":  # allocates all memory at the start
        with pytest.raises(UserError, match=r"max_bytes=20000 is 20 KB: lower replay.capacity to \d+"):
            filled(capacity=600, max_bytes=20_000)
        return
    layout = layout_for(Window(), 10)
    unlimited = filled(alpha=0.3, capacity=600, steps=290)[-1]
    limit = unlimited.nbytes - 20_000
    twin = Twin(2, 0)
    chunker, tight = Chunker(layout, 2), replay_for(layout, alpha=0.3, capacity=600, max_bytes=limit)
    for _ in range(40):
        play(twin, chunker, tight, 20)
        tight.check_valid()
        assert tight.nbytes <= limit
    live = tight.state_dict()
    assert 5 < live["next"] - live["first"] < 57
    for item in range(64):
        compare_window(tight.sample(64), item, twin, layout)


def test_the_rate_limiter_limits_sampling():
    layout, twin = layout_for(Window(), 10), Twin(2, seed=0)
    chunker, replay = Chunker(layout, 2), replay_for(layout, min_steps=60, samples_per_insert=0.5)
    drawn = []
    for step in range(1, 101):
        play(twin, chunker, replay, 1)
        while replay.sample(8) is not None:
            drawn.append(step)
    assert drawn[0] == 38 and len(drawn) == (200 - 60) // 16
    assert replay.metrics()["replay/samples_per_insert"] == pytest.approx(8 * len(drawn) / 140)


def test_an_empty_store_returns_no_sample():
    replay = replay_for(layout_for(Window(), 10))
    replay.clock.count_steps(1000)
    assert replay.sample(4) is None


def test_metrics_report_size_and_memory():
    replay = filled(alpha=0.6)[-1]
    metrics = replay.metrics()
    chunks = replay.state_dict()["next"] - replay.state_dict()["first"]
    saved_bytes = sum(len(block) for segment in replay.segments() for block in segment.blocks())
    assert metrics["replay/bytes"] > saved_bytes / 2
    assert metrics["replay/bytes_per_step"] == pytest.approx(metrics["replay/bytes"] / (chunks * 10))
    assert 0 < metrics["replay/size"] <= chunks * 10 and metrics["replay/beta"] >= 0.4


def saved(replay):
    return replay.state_dict(), {s.name: b"".join(s.blocks()) for s in replay.segments()}


def restored(layout, state, files, **cfg):
    replay = replay_for(layout, 99, **cfg)
    replay.load_state_dict(state)
    replay.load_segments((name, io.BytesIO(data)) for name, data in files.items())
    replay.check_valid()
    return replay


@given(st.integers(0, 2**16), st.sampled_from([0.0, 0.6]), st.integers(0, 150))
@settings(deadline=None, max_examples=8)
def test_a_restored_replay_continues_bitwise(seed, alpha, steps):
    layout, twin, chunker, one = filled(alpha=alpha, seed=seed, steps=steps, capacity=200)
    if (sample := one.sample(8)) is not None:
        one.update(sample.keys, twin.rng.random(8))
    two = restored(layout, *saved(one), alpha=alpha, capacity=200)
    for _ in range(40):
        one.clock.count_steps(2), two.clock.count_steps(2)
        for _, chunk in append(chunker, twin):
            assert one.add(chunk) == two.add(chunk)
        if (a := one.sample(8)) is None:
            assert two.sample(8) is None
            continue
        b = two.sample(8)
        np.testing.assert_array_equal(a.keys, b.keys)
        assert torch.equal(a.weight, b.weight) and all(torch.equal(a.rows[name], b.rows[name]) for name in a.rows)
        priority = twin.rng.random(8)
        one.update(a.keys, priority), two.update(b.keys, priority)
    assert one.metrics() == two.metrics()


def test_segments_are_immutable_and_named_by_content():
    layout, twin, chunker, replay = filled(steps=400, capacity=2000)
    _, early = saved(replay)
    play(twin, chunker, replay, 500)
    _, late = saved(replay)
    assert len(early) == 2 and len(late) == 3
    assert [name for name in early if name in late] == [next(iter(early))]  # the full segment stays, the tail grew
    assert all(late[name] == data for name, data in early.items() if name in late)
    assert next(iter(late)).startswith("replay-000000000000-000000000063-")
    assert restored(layout, *saved(replay), alpha=0.6, capacity=2000).metrics() == replay.metrics()
    play(twin, chunker, replay, 300)
    assert next(iter(saved(replay)[1])).startswith("replay-0000000000")  # a head that lost chunks is a new segment
    assert not next(iter(saved(replay)[1])).startswith("replay-000000000000-")
    other = filled(steps=400, capacity=2000, seed=1)[-1]
    assert not set(saved(other)[1]) & set(early)  # equal serials, other contents


def test_damaged_or_missing_segments_are_refused():
    layout, _, _, replay = filled(steps=400, capacity=2000)
    state, files = saved(replay)
    name, data = next(iter(files.items()))
    for bad, message in [(data[:-1], "ends within chunk"), (data + b"x", "follow its last"), (b"", "too few"),
                         (b"QFSX" + data[4:], "begins with"), (data[:200] + b"\xff" + data[201:], "checksum"),
                         (data[:22], "ends before chunk")]:
        with pytest.raises(ValueError, match=f"{name}.*{message}"):
            restored(layout, state, files | {name: bad}, alpha=0.6, capacity=2000)
    with pytest.raises(ValueError, match="chunks are missing, the first is 0"):
        restored(layout, state, {key: value for key, value in files.items() if key != name}, alpha=0.6, capacity=2000)
    with pytest.raises(ValueError, match="leaves"):
        restored(layout, state | {"leaves": state["leaves"][:-1]}, files, alpha=0.6, capacity=2000)
    with pytest.raises(ValueError, match="does not match its saved priorities"):
        restored(layout, state | {"leaves": np.roll(state["leaves"], 1)}, files, alpha=0.6, capacity=2000)


def test_a_smaller_capacity_keeps_the_newest():
    layout, twin, _, replay = filled(steps=400, capacity=2000)
    small = restored(layout, *saved(replay), alpha=0.6, capacity=300)
    live = small.state_dict()
    assert live["next"] == replay.state_dict()["next"] and live["next"] - live["first"] == 30
    sample = small.sample(64)
    for item in range(64):
        compare_window(sample, item, twin, layout)


def test_counters_beyond_two_to_the_31():
    layout, twin, chunker, replay = filled(alpha=0.6, capacity=100)
    state, start = replay.state_dict(), 2**31 - 2
    limiter = state["pace"] | {"steps": start, "samples": start, "origin": [start, start]}
    empty = {"first": start, "next": start, "leaves": np.zeros(0), "lengths": np.zeros(0), "pace": limiter}
    replay.load_state_dict(state | empty)
    play(twin, chunker, replay, 60)
    sample = replay.sample(32)
    assert sample.keys.min() > (2**31) * 10 and replay.rate_limiter.steps == start + 120
    for item in range(32):
        compare_window(sample, item, twin, layout)
    replay.update(sample.keys, np.full(32, 3.0))
    assert (replay.state_dict()["leaves"] == 3.0**0.6).sum() == len(set(sample.keys.tolist()))
    replay.check_valid()
    again = restored(layout, *saved(replay), alpha=0.6, capacity=100)
    np.testing.assert_array_equal(again.sample(8).keys, replay.sample(8).keys)
