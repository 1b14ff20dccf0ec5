"""Running statistics of rows: as one pass over all rows, however they arrive and by whomever they are merged."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from qfleet.core.agent import ROW_MOMENTS
from qfleet.maths.moments import Moments
from qfleet.optim.flat_params import Flat
from qfleet.optim.row_moments import RowMoments, buffers_of, moments_of

SIZE = 3


def network():
    net = nn.Linear(1, 1)
    for name, shape in zip(ROW_MOMENTS, ((), (SIZE,), (SIZE,)), strict=True):
        net.register_buffer(name, torch.zeros(shape, dtype=torch.float64))
    return Flat(net)


def statistics(flat=None, exchanged=True):
    flat = network() if flat is None else flat
    return RowMoments(lambda columns: columns["x"], flat, exchanged), flat


def chunks(seed, count=7):
    rng = np.random.default_rng(seed)
    return [1e4 + rng.normal(size=(rng.integers(0, 9), SIZE)) * [1e-2, 1, 1e3] for _ in range(count)]


def assert_moments(flat, rows):
    """The buffers against NumPy's mean and variance."""
    count, mean, square = (flat.buffer(name).numpy() for name in ROW_MOMENTS)
    assert count == len(rows)
    np.testing.assert_allclose(mean, rows.mean(0), rtol=1e-12)
    np.testing.assert_allclose(square / count, rows.var(0), rtol=1e-6)


def assert_equal(one, other):
    assert all(torch.equal(one.buffer(name), other.buffer(name)) for name in ROW_MOMENTS)


@given(st.integers(0, 1000), st.lists(st.integers(0, 30), max_size=6))
def test_moments_of_parts_merge_to_those_of_the_whole(seed, cuts):
    rows = np.random.default_rng(seed).normal(3, 2, (30, SIZE))
    merged = Moments.empty(SIZE)
    for part in np.split(rows, sorted(cuts)):
        merged = merged.merge(Moments.from_row(Moments.of(part).to_row()))
    whole = Moments.of(rows)
    assert merged.count == 30
    np.testing.assert_allclose(merged.mean, whole.mean)
    np.testing.assert_allclose(merged.square, whole.square)


def test_the_network_gets_the_moments_of_all_rows_when_they_are_written():
    moments, flat = statistics()
    for rows in chunks(0):
        moments.add({"x": rows})
    assert float(flat.buffer("row_count")) == 0
    moments.write()
    assert_moments(flat, np.concatenate(chunks(0)))


def test_rows_that_are_not_finite_are_left_out():
    moments, flat = statistics()
    rows = np.concatenate(chunks(0))
    bad = rows[:3].copy()
    bad[0, 1], bad[1, 0], bad[2, 2] = np.nan, np.inf, -np.inf
    moments.add({"x": np.concatenate([bad, rows])})
    moments.write()
    assert_moments(flat, rows)


@pytest.mark.parametrize("written", [True, False])
def test_saved_and_loaded_they_continue_bit_by_bit(written):
    moments, flat = statistics()
    for rows in chunks(0):
        moments.add({"x": rows})
    if written:
        moments.write()
    saved, weights = moments.state_dict(), flat.state()
    assert bool(saved) is not written
    other = network()
    other.load(weights)
    again, _ = statistics(other)
    again.load_state_dict(saved)
    for each in (moments, again):
        for rows in chunks(1):
            each.add({"x": rows})
        each.write()
    assert_equal(flat, other)


def test_ranks_hold_the_moments_of_the_rows_of_all():
    ranks = [statistics() for _ in range(3)]
    for seed in range(4):
        for rank, (moments, _) in enumerate(ranks):
            for rows in chunks(10 * seed + rank)[rank:]:  # of different numbers of rows
                moments.add({"x": rows})
        votes = [moments.take_row() for moments, _ in ranks]
        for moments, _ in ranks:
            moments.merge_ranks(votes)
            moments.write()
    everything = [rows for seed in range(4) for rank in range(3) for rows in chunks(10 * seed + rank)[rank:]]
    for _, flat in ranks:
        assert_moments(flat, np.concatenate(everything))
        assert_equal(flat, ranks[0][1])


def test_one_rank_and_one_learner_without_others_are_equal_bit_by_bit():
    (alone, solo), (rank, voting) = statistics(exchanged=False), statistics()
    for seed in range(3):
        for moments in (alone, rank):
            for rows in chunks(seed):
                moments.add({"x": rows})
        rank.merge_ranks([rank.take_row()])
        for moments in (alone, rank):
            moments.write()
        assert_equal(solo, voting)
    assert rank.take_unsent() == alone.take_unsent() == []


def test_moments_of_a_server_replace_the_own_but_not_what_was_not_sent():
    moments, flat = statistics()
    first, second, others = chunks(0), chunks(1), np.concatenate(chunks(2))
    for rows in first:
        moments.add({"x": rows})
    sent = moments.take_unsent()
    for rows in second:
        moments.add({"x": rows})
    served = Moments.of(others)
    for new in sent:
        served = served.merge(new)
    moments.replace(served)
    moments.write()
    assert_moments(flat, np.concatenate([others, *first, *second]))
    assert moments_of(buffers_of(served)).to_row().tolist() == served.to_row().tolist()
