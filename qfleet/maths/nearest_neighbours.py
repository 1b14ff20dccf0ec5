"""k nearest neighbours in the episodic memories of many lanes.

Shapes: N lanes, M memories, D features, k nearest neighbours.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from qfleet.core.devices import is_on_host
from qfleet.core.jit import HAS_NUMBA, jit


def knn_squared_distances(keys: torch.Tensor, count: torch.Tensor, key: torch.Tensor, k: int) -> torch.Tensor:
    """Squared distances [N, k], unordered, from `key` [N, D] to its nearest neighbours in `keys` [N, M, D].

    Only the first `count` [N] memories of a lane count; inf where there are fewer than k.
    """
    if not is_on_host(count):
        return knn_topk_padded(keys, count, key, k)
    if HAS_NUMBA:
        found = np.full((len(key), k), np.inf, np.float32)
        knn_scan(keys.detach().numpy(), count.numpy(), key.detach().contiguous().numpy(), found)
        return torch.from_numpy(found)
    return knn_topk(keys, count, key, k)


def knn_topk(keys: torch.Tensor, count: torch.Tensor, key: torch.Tensor, k: int) -> torch.Tensor:
    """`knn_squared_distances` with torch operations, over the used slots of `keys`."""
    return knn_topk_padded(keys[:, :max(1, int(count.max()))], count, key, k)


def knn_topk_padded(keys: torch.Tensor, count: torch.Tensor, key: torch.Tensor, k: int) -> torch.Tensor:
    """`knn_squared_distances` over all slots of `keys`, without reading `count` on the host."""
    size = keys.shape[1]
    distance = (keys - key.unsqueeze(1)).square().sum(2)
    empty = torch.arange(size, device=key.device) >= count.unsqueeze(1)
    nearest = distance.masked_fill(empty, torch.inf).topk(min(k, size), 1, largest=False, sorted=False).values
    return F.pad(nearest, (0, k - nearest.shape[1]), value=torch.inf)


@partial(jit, reorder=True)
def knn_scan(keys: Any, count: Any, key: Any, found: Any) -> None:
    """One pass over the memories: a distance below the largest in `found` [N, k] replaces it."""
    for lane in range(len(key)):
        farthest = 0
        for m in range(min(count[lane], keys.shape[1])):
            distance = np.float32(0)
            for d in range(keys.shape[2]):
                distance += (keys[lane, m, d] - key[lane, d]) ** 2
            if distance < found[lane, farthest]:
                found[lane, farthest] = distance
                farthest = found[lane].argmax()
