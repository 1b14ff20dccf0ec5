"""The nearest of what an episode has shown so far, for many lanes at once.

Shapes: N lanes, M memories, D features, k nearest neighbours.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from qfleet.maths.compiled import HAS_NUMBA, jit


def knn_squared_distances(keys: torch.Tensor, count: torch.Tensor, key: torch.Tensor, k: int) -> torch.Tensor:
    """Squared distances [N, k], in no order, from `key` [N, D] to the nearest of the first `count` [N] of `keys`
    [N, M, D]; inf where there are fewer."""
    if HAS_NUMBA and key.device.type == "cpu":
        found = np.full((len(key), k), np.inf, np.float32)
        knn_scan(keys.detach().numpy(), count.numpy(), key.detach().contiguous().numpy(), found)
        return torch.from_numpy(found)
    return knn_topk(keys, count, key, k)


def knn_topk(keys: torch.Tensor, count: torch.Tensor, key: torch.Tensor, k: int) -> torch.Tensor:
    """As `nearest`, by operations of torch, on any device. A GPU compares the places of memories to come, too: who
    asked it how many there are would have to wait for the answer."""
    return knn_topk_padded(keys if key.is_cuda else keys[:, :max(1, int(count.max()))], count, key, k)


def knn_topk_padded(keys: torch.Tensor, count: torch.Tensor, key: torch.Tensor, k: int) -> torch.Tensor:
    """As `nearest`; nothing is asked of the device."""
    size = keys.shape[1]
    apart = (keys - key.unsqueeze(1)).square().sum(2)
    empty = torch.arange(size, device=key.device) >= count.unsqueeze(1)
    close = apart.masked_fill(empty, torch.inf).topk(min(k, size), 1, largest=False, sorted=False).values
    return F.pad(close, (0, k - close.shape[1]), value=torch.inf)


@partial(jit, reorder=True)
def knn_scan(keys: Any, count: Any, key: Any, found: Any) -> None:
    """One pass over the memories: whatever is nearer than the farthest of `found` [N, k] takes its place."""
    for lane in range(len(key)):
        farthest = 0
        for m in range(min(count[lane], keys.shape[1])):
            apart = np.float32(0)
            for d in range(keys.shape[2]):
                apart += (keys[lane, m, d] - key[lane, d]) ** 2
            if apart < found[lane, farthest]:
                found[lane, farthest] = apart
                farthest = found[lane].argmax()
