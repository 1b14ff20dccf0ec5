"""The chunker compared with a plain list of rows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_twin import SPEC, Twin, append, key, layout_for, place

from qfleet.core.env import OBS_PREFIX, EnvSpec, Leaf
from qfleet.core.errors import UserError
from qfleet.core.replay import Window
from qfleet.replay.chunker import Chunker, staggered_padding
from qfleet.replay.layout import Layout

WINDOWS = st.sampled_from([Window(), Window(future=3), Window(past=1, unroll=2, future=2, stride=2), Window(unroll=3)])


def starts_of(chunks, layout):
    """(lane, t) of the first trained row of every valid start of all chunks."""
    found = []
    for lane, chunk in chunks:
        rows = layout.context + np.arange(layout.starts) * layout.window.stride + layout.window.past
        for row in rows[chunk.valid]:
            found.append(place(int(chunk.columns["row"][row])))
            assert found[-1][0] == lane
    return found


@given(WINDOWS, st.integers(2, 5), st.integers(0, 2**16), st.integers(1, 40))
@settings(deadline=None, max_examples=25)
def test_every_row_of_a_chunk_equals_the_twin(window, half, seed, steps):
    layout, twin = layout_for(window, 2 * half), Twin(2, seed)
    chunker = Chunker(layout, 2)
    for _ in range(steps):
        for lane, chunk in append(chunker, twin):
            keys = chunk.columns["row"]
            begin = int(np.flatnonzero(keys)[0])
            first = place(keys[begin])[1] - begin
            assert begin <= layout.context + layout.lead
            np.testing.assert_array_equal(chunk.columns["state"], keys[layout.state_chunk_rows, None].repeat(2, 2))
            for row in range(layout.rows):
                t = first + row
                if t < 0 or keys[row] != key(lane, t):  # before the stream, or after the end of an episode
                    assert chunk.columns["last"][row]
                    assert all(not values[row].any() for name, values in chunk.columns.items()
                               if name not in ("last", "state"))
                    continue
                true = twin.rows[lane][t]
                assert chunk.columns["action"][row] == true.action and chunk.columns["last"][row] == true.last
                assert chunk.columns["reward"][row] == np.float32(true.reward)
                assert chunk.columns["discount"][row] == true.discount
                for name, frame in true.frames.items():
                    np.testing.assert_array_equal(chunk.columns[OBS_PREFIX + name][row], frame)


@given(st.integers(1, 4), st.integers(4, 9), st.integers(0, 2**16), st.integers(0, 40), st.booleans())
@settings(deadline=None, max_examples=25)
def test_flushed_streams_have_one_start_per_step(future, chunk_steps, seed, steps, spread):
    layout, twin = layout_for(Window(future=future), chunk_steps), Twin(2, seed)
    chunker, chunks = Chunker(layout, 2, staggered_padding(layout, 2) if spread else ()), []
    for _ in range(steps):
        chunks += append(chunker, twin)
    chunks += append(chunker, twin, end=True) + chunker.flush()
    wanted = [(lane, t) for lane in range(2) for t, row in enumerate(twin.rows[lane]) if not row.last]
    assert sorted(starts_of(chunks, layout)) == wanted
    assert chunker.flush() == []
    fresh = [chunk for _ in range(layout.rows - layout.context) for _, chunk in append(chunker, twin)]
    assert len(fresh) == 2
    for chunk in fresh:  # a new stream: its context holds no rows of the old one
        context = {name: values[:layout.context] for name, values in chunk.columns.items()}
        assert context["last"].all() and not context["obs.image"].any()


@pytest.mark.parametrize("lanes", [3, 8, 12])
def test_staggered_lanes_spread_their_chunks_over_time(lanes):
    layout = layout_for(Window(future=2), 8)
    counts = {}
    for spread in (False, True):
        chunker, twin = Chunker(layout, lanes, staggered_padding(layout, lanes) if spread else ()), Twin(lanes, seed=2)
        counts[spread] = [len(append(chunker, twin)) for _ in range(40)]
        append(chunker, twin, end=True)
        chunker.flush()  # as when a run resumes, or ends its episodes at a checkpoint
        counts[spread] += [len(append(chunker, twin)) for _ in range(40)]
    assert max(counts[False]) == lanes
    assert max(counts[True]) == -(-lanes // 8), "chunks must be spread over the steps of a chunk"
    assert abs(sum(counts[True]) - sum(counts[False])) <= 2 * lanes


def test_staggered_padding_is_a_multiple_of_the_stride():
    layout = Layout(SPEC, Window(future=3, stride=4), 16)
    assert staggered_padding(layout, 5) == [0, 0, 4, 8, 12]


def test_flush_without_final_rows_starts_no_incomplete_window():
    layout, twin = layout_for(Window(future=3), 8), Twin(1, seed=3, end_chance=0.0)
    chunker, chunks = Chunker(layout, 1), []
    for _ in range(12):
        chunks += append(chunker, twin)
    assert starts_of(chunks + chunker.flush(), layout) == [(0, t) for t in range(12 - 3)]


@given(st.sampled_from([1, 2, 4]), st.integers(0, 3), st.integers(0, 2**16))
@settings(deadline=None, max_examples=15)
def test_no_unrolled_window_crosses_an_episode_and_every_step_of_it_is_trained(stride, past, seed):
    window = Window(past=past, unroll=4, future=2, stride=stride)
    layout, twin = layout_for(window, 8), Twin(3, seed)
    chunker, chunks = Chunker(layout, 3), []
    for _ in range(60):
        chunks += append(chunker, twin)
    chunks += append(chunker, twin, end=True)
    assert all(twin.rows[lane][-1].last for lane in range(3)) and chunker.flush() == []
    for _, chunk in chunks:
        begin = layout.context + int(np.flatnonzero(~chunk.columns["last"][layout.context:])[0])
        assert not chunk.columns["row"][:begin].any() or chunk.columns["row"][:begin].all(), "padding, or all context"
        ends = np.flatnonzero(chunk.columns["last"][begin:])
        if len(ends):  # only padding follows the final row
            rest = chunk.columns["row"][begin + ends[0] + 1:]
            assert chunk.columns["last"][begin + ends[0]:].all() and not rest.any()
    wanted = []
    for lane in range(3):
        begun = 0
        for t, row in enumerate(twin.rows[lane]):
            if (t - begun) % stride == 0 and not row.last:
                wanted.append((lane, t))
            begun = t + 1 if row.last else begun
    assert sorted(starts_of(chunks, layout)) == wanted


@pytest.mark.parametrize(("window", "padding"), [
    (Window(future=2), ()), (Window(future=2), (0, 3)), (Window(past=2, unroll=2, future=2, stride=2), ())])
def test_state_round_trip(window, padding):
    layout, twin = layout_for(window, 6), Twin(2, seed=1)
    one, two = Chunker(layout, 2, padding), Chunker(layout, 2, padding)
    for _ in range(17):
        append(one, twin)
    two.load_state_dict(one.state_dict())
    compared = 0
    for _ in range(30):
        obs, columns = twin.advance()
        row = columns.pop("row")
        extras = {"row": row, "state": np.stack([row, row], 1)}
        for (_, a), (_, b) in zip(one.append(obs, **columns, extras=extras),
                                  two.append(obs, **columns, extras=extras), strict=True):
            compared += 1
            assert all(np.array_equal(a.columns[name], b.columns[name]) for name in a.columns)
            assert np.array_equal(a.valid, b.valid)
    assert compared > 4


def test_layout_counts_rows_and_blocks():
    atari = EnvSpec("a", {"obs": Leaf((4, 84, 84), "uint8", "image", stack=4)}, 6)
    layout = Layout(atari, Window(future=1), 64)
    assert (layout.context, layout.starts, layout.rows) == (3, 64, 68)
    assert (layout.blocks, layout.block_rows) == (4, 17)
    assert [c.name for c in layout.blocked] == ["obs.obs"]
    strided = Layout(atari, Window(past=2, unroll=4, future=2, stride=4), 16)
    assert (strided.starts, strided.rows) == (4, 3 + 12 + 8)  # the last window starts at step 12
    for chunk_steps in (1, 7, 16, 641, 1000):
        sized = Layout(atari, Window(future=2), chunk_steps)
        assert sum(sized.rows_of_block(i) for i in range(sized.blocks)) == sized.rows
        assert min(sized.rows_of_block(i) for i in range(sized.blocks)) > 0


def test_impossible_layouts_are_refused():
    with pytest.raises(UserError, match="multiple of the stride"):
        Layout(SPEC, Window(unroll=4, stride=3), 8)
    with pytest.raises(ValueError, match="reward"):
        Layout(SPEC, Window(), 8, {"reward": ((), "float32")})
