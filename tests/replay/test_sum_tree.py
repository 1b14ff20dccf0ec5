"""The sum tree compared with plain arrays, with and without numba."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qfleet.replay.priorities import (
    SumTree,
    change_compiled,
    change_levelwise,
    sample_compiled,
    sample_levelwise,
    set_compiled,
    set_levelwise,
)

VALUES = st.sampled_from([0.0, 0.0, 1e-6, 0.1, 1.0, 3.0, 1e6])


@given(st.integers(1, 70), st.lists(st.lists(st.tuples(st.integers(0, 10**6), VALUES), max_size=20), max_size=8))
@settings(deadline=None)
def test_tree_equals_plain_leaves(leaves, writes):
    tree, plain = SumTree(leaves), np.zeros(leaves)
    for write in writes:
        indices = np.array([i % leaves for i, _ in write], np.int64)
        values = np.array([v for _, v in write], np.float64)
        tree.set(indices, values)
        for i, v in zip(indices, values, strict=True):
            plain[i] = v
        np.testing.assert_array_equal(tree.leaves, plain)
        np.testing.assert_allclose(tree.total, plain.sum(), rtol=1e-12)
    fresh = SumTree(leaves)
    fresh.fill(plain)
    assert fresh.total == tree.total  # bitwise: parents are sums of children, regardless of the writes before


@given(st.integers(1, 70), st.integers(0, 2**16))
@settings(deadline=None)
def test_compiled_and_numpy_versions_agree_bitwise(leaves, seed):
    rng = np.random.default_rng(seed)
    tree = SumTree(leaves)
    offset = 1 << tree.depth
    one, two = np.zeros(2 * offset), np.zeros(2 * offset)
    for _ in range(5):
        node = rng.integers(0, leaves, 20) + offset
        values = rng.choice([0.0, 1e-6, 0.3, 7.0], 20)
        set_compiled(one, node.copy(), values, tree.depth)
        set_levelwise(two, node.copy(), values, tree.depth)
        np.testing.assert_array_equal(one, two)
        if one[1] > 0:
            mass = np.sort(rng.random(50)) * one[1]
            for a, b in zip(sample_compiled(one, mass.copy(), tree.depth),
                            sample_levelwise(two, mass.copy(), tree.depth), strict=True):
                np.testing.assert_array_equal(a, b)
        node, values = rng.integers(0, leaves, 20) + offset, rng.random(20) + 0.1
        change_compiled(one, node.copy(), values.copy(), tree.depth)
        change_levelwise(two, node.copy(), values.copy(), tree.depth)
        np.testing.assert_array_equal(one, two)


@given(st.integers(1, 100), st.integers(0, 2**16))
@settings(deadline=None)
def test_zero_leaves_are_never_sampled(leaves, seed):
    rng = np.random.default_rng(seed)
    values = rng.random(leaves) * rng.choice([0.0, 1e-6, 1.0, 1e6], leaves)
    values[rng.integers(leaves)] = 0.1
    tree = SumTree(leaves)
    tree.fill(values)
    edges = np.cumsum(values) / values.sum()
    uniforms = np.concatenate([rng.random(64), [0.0, np.nextafter(1.0, 0.0), 1.0], edges, np.nextafter(edges, 2.0)])
    drawn, value = tree.sample(np.sort(uniforms))
    assert (values[drawn] > 0).all()
    np.testing.assert_array_equal(value, values[drawn])


def test_samples_follow_the_cumulative_sum():
    values = np.array([1.0, 0.0, 2.0, 5.0, 0.0])
    tree = SumTree(5)
    tree.fill(values)
    assert tree.sample(np.array([0.0, 0.124, 0.126, 0.37, 0.38, 0.99]))[0].tolist() == [0, 0, 2, 2, 3, 3]


def test_change_keeps_zero_leaves_at_zero():
    tree = SumTree(4)
    tree.fill(np.array([1.0, 0.0, 2.0, 0.0]))
    tree.change(np.array([0, 1, 3]), np.array([5.0, 5.0, 5.0]))
    assert tree.leaves.tolist() == [5.0, 0.0, 2.0, 0.0] and tree.total == 7.0


def test_an_empty_tree_cannot_be_sampled():
    with pytest.raises(ValueError, match="every leaf is zero"):
        SumTree(4).sample(np.array([0.5]))


def test_rounding_errors_do_not_accumulate():
    rng, tree = np.random.default_rng(0), SumTree(64)
    for _ in range(2000):
        tree.set(rng.integers(0, 64, 8), rng.choice([1e-6, 1e6, 1.0], 8))
    tree.set(np.arange(64), np.full(64, 1e-6))
    np.testing.assert_allclose(tree.total, 64e-6, rtol=1e-12)
