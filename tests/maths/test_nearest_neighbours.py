"""The nearest memories: compiled, by torch, and by a naive float64 loop."""

import numpy as np
import pytest
import torch

from qfleet.core.jit import HAS_NUMBA
from qfleet.maths.nearest_neighbours import knn_scan, knn_squared_distances, knn_topk, knn_topk_padded


def naive(keys, count, key, k):
    found = np.full((len(key), k), np.inf)
    for lane, many in enumerate(count):
        apart = sorted(((keys[lane, :many] - key[lane]) ** 2).sum(1))[:k]
        found[lane, :len(apart)] = apart
    return found


def uncompiled(keys, count, key, k):
    found = np.full((len(key), k), np.inf, np.float32)
    getattr(knn_scan, "py_func", knn_scan)(keys.numpy(), count.numpy(), key.numpy(), found)
    return torch.from_numpy(found)


@pytest.mark.parametrize("way", [knn_squared_distances, knn_topk, knn_topk_padded, uncompiled])
def test_equals_a_naive_loop(way):
    assert HAS_NUMBA, "otherwise two of the ways are the same"
    rng = np.random.default_rng(0)
    for _ in range(20):
        lanes, capacity, features, k = (int(n) for n in rng.integers(1, [5, 30, 9, 12]))
        keys, key = rng.normal(size=(lanes, capacity, features)), rng.normal(size=(lanes, features))
        keys[:, capacity // 2:] = keys[:, :1]  # ties
        keys[:, -1] = key  # and what has been seen exactly so
        keys, key = keys.astype(np.float32), key.astype(np.float32)
        count = rng.integers(0, capacity + 1, lanes)
        found = way(torch.from_numpy(keys), torch.from_numpy(count), torch.from_numpy(key), k)
        wanted = naive(keys.astype(np.float64), count, key.astype(np.float64), k)
        np.testing.assert_allclose(found.sort(1).values, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", [knn_squared_distances, knn_topk])
def test_a_full_memory_counts_on(way):
    """`count` goes beyond the capacity: then all of it is there."""
    keys = torch.arange(12.0).view(1, 6, 2)
    found = way(keys, torch.tensor([9]), torch.zeros(1, 2), 7)
    assert found.isfinite().sum() == 6 and found.min() == 1
