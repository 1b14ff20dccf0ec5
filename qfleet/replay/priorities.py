"""Proportional prioritisation (PER): priorities in a sum tree, and importance-sampling weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from qfleet.core.jit import HAS_NUMBA, jit
from qfleet.replay.config import ReplayConfig

MIN_PRIORITY, MAX_PRIORITY = 1e-6, 1e6
"""Range of a priority. Values outside it and NaN are clamped and counted."""


class PriorityIndex(Protocol):
    """Priorities of all starts: one value per leaf, 0 for starts that must not be sampled."""

    def write(self, leaves: np.ndarray, priority: np.ndarray | None, valid: np.ndarray) -> None: ...
    def update(self, leaves: np.ndarray, priority: np.ndarray) -> None: ...
    def get(self, leaves: np.ndarray) -> np.ndarray: ...
    def set(self, leaves: np.ndarray, values: np.ndarray) -> None: ...
    def fill(self, values: np.ndarray) -> None: ...
    def total(self) -> float: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def clamp_priorities(priority: np.ndarray) -> tuple[np.ndarray, float, int]:
    """Return the clamped priorities, the largest one that needed no clamping, and the number of clamped ones."""
    given = np.asarray(priority, np.float64)
    smallest, largest = given.min(initial=1.0), given.max(initial=1.0)
    if smallest >= MIN_PRIORITY and largest <= MAX_PRIORITY:  # false for NaN
        return given, float(largest), 0
    in_range = (given >= MIN_PRIORITY) & (given <= MAX_PRIORITY)
    # One clamped value must not raise the initial priority of all later chunks: only values in range count.
    largest = float(given[in_range].max(initial=0.0))
    values = np.clip(
        np.nan_to_num(given, nan=MIN_PRIORITY, posinf=MAX_PRIORITY, neginf=MIN_PRIORITY), MIN_PRIORITY, MAX_PRIORITY
    )
    return values, largest, int((~in_range).sum())


def importance_exponent(cfg: ReplayConfig, steps: int) -> float:
    """β after `steps` environment steps; constant after `beta_steps`."""
    done = min(1.0, steps / cfg.beta_steps)
    return cfg.beta_start + done * (cfg.beta_end - cfg.beta_start)


class Priorities:
    """Priorities of all starts: leaves hold priority ** alpha, 0 for starts that must not be sampled.

    With alpha = 0 all valid starts are equally likely. New starts without a priority get the largest priority seen, so
    that every start is likely to be sampled soon.
    """

    def __init__(self, leaves: int, alpha: float) -> None:
        self.tree = SumTree(leaves)
        self.alpha = alpha
        self.largest = 1.0
        self.clamped = 0

    def write(self, leaves: np.ndarray, priority: np.ndarray | None, valid: np.ndarray) -> None:
        """Set the leaves [S] of a new chunk; leaves that are not `valid` become 0."""
        if self.alpha == 0:
            values = np.ones(len(leaves))
        elif priority is None:
            values = np.full(len(leaves), self.largest ** self.alpha)
        else:
            values = self._clamp(np.where(valid, priority, 1.0)) ** self.alpha
        self.tree.set(leaves, np.where(valid, values, 0.0))

    def update(self, leaves: np.ndarray, priority: np.ndarray) -> None:
        """Set new priorities of sampled leaves; leaves that are 0 stay 0."""
        if self.alpha > 0:
            self.tree.change(leaves, self._clamp(priority) ** self.alpha)

    def draw(self, uniforms: np.ndarray, beta: float, size: int) -> tuple[np.ndarray, np.ndarray, float]:
        """Stratified sample: leaves int64 [B], one from each B-th of the total, ascending; `uniforms` [B] in [0, 1).

        Also returns the importance weights, float32 [B]: (N P(i)) ** -beta divided by their maximum, where N and the
        total cancel out; and that maximum, for N = `size`. Overwrites `uniforms`.
        """
        uniforms += np.arange(len(uniforms))
        uniforms /= len(uniforms)
        leaves, values = self.tree.sample(uniforms)
        if self.alpha == 0:
            return leaves, np.ones(len(leaves), np.float32), 1.0
        least = values.min()
        weight = (least / values).astype(np.float32) ** np.float32(beta)
        return leaves, weight, float(size * least / self.tree.total) ** -beta

    def _clamp(self, priority: np.ndarray) -> np.ndarray:
        """Clamp priorities, and update the largest one seen and the count of clamped ones."""
        values, largest, clamped = clamp_priorities(priority)
        self.largest = max(self.largest, largest)
        self.clamped += clamped
        return values

    def get(self, leaves: np.ndarray) -> np.ndarray:
        return self.tree.get(leaves)

    def set(self, leaves: np.ndarray, values: np.ndarray) -> None:
        self.tree.set(leaves, values)

    def fill(self, values: np.ndarray) -> None:
        """Set all leaves."""
        self.tree.fill(values)

    def resize(self, values: np.ndarray) -> None:
        """Replace the tree by one with these leaves."""
        self.tree = SumTree(len(values))
        self.tree.fill(values)

    def total(self) -> float:
        return self.tree.total

    def state_dict(self) -> dict[str, Any]:
        return {"largest": self.largest, "clamped": self.clamped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.largest, self.clamped = float(state["largest"]), int(state["clamped"])


class SumTree:
    """Non-negative float64 leaves in one flat array: node i has children 2i and 2i + 1, the root is node 1.

    A parent is always recomputed as left + right, never by adding a difference, so that rounding errors do not
    accumulate and equal leaves give a bitwise equal tree. `set` and `sample` traverse the tree level by level for all
    items at once: the memory accesses of one level are independent. Ascending points need no descent from the root:
    one sweep along a middle level finds their nodes there.
    """

    def __init__(self, leaves: int) -> None:
        self.depth = max(0, int(leaves - 1).bit_length())
        self._offset = 1 << self.depth
        self._nodes = np.zeros(2 * self._offset)
        self.leaves = self._nodes[self._offset:self._offset + leaves]

    @property
    def total(self) -> float:
        return float(self._nodes[1])

    @property
    def nbytes(self) -> int:
        return self._nodes.nbytes

    def get(self, indices: np.ndarray) -> np.ndarray:
        return self.leaves[indices]

    def set(self, indices: np.ndarray, values: np.ndarray) -> None:
        """Set leaves, indices int64 [n] and values float64 [n]; of duplicate indices the last one counts."""
        _set(self._nodes, indices + self._offset, values, self.depth)

    def change(self, indices: np.ndarray, values: np.ndarray) -> None:
        """Set leaves to positive values; leaves that are zero stay zero."""
        _change(self._nodes, indices + self._offset, values, self.depth)

    def fill(self, values: np.ndarray) -> None:
        """Set all leaves."""
        self.leaves[:] = values
        for level in range(self.depth - 1, -1, -1):
            first = 1 << level
            children = self._nodes[2 * first:4 * first]
            self._nodes[first:2 * first] = children[0::2] + children[1::2]

    def sample(self, uniforms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Leaves int64 [n] and their values at ascending fractions [n] in [0, 1) of the total; never a zero leaf."""
        if not self.total > 0:
            raise ValueError("nothing to sample: every leaf is zero")
        node, value = _sample(self._nodes, uniforms * self.total, self.depth)
        node -= self._offset
        return node, value


def set_levelwise(nodes: np.ndarray, node: np.ndarray, values: np.ndarray, depth: int) -> None:
    """`SumTree.set` in NumPy, level by level."""
    nodes[node] = values
    for _ in range(depth):
        node = np.unique(node >> 1)
        nodes[node] = nodes[2 * node] + nodes[2 * node + 1]


def change_levelwise(nodes: np.ndarray, node: np.ndarray, values: np.ndarray, depth: int) -> None:
    """`SumTree.change` in NumPy."""
    alive = nodes[node] > 0
    set_levelwise(nodes, node[alive], values[alive], depth)


def sample_levelwise(nodes: np.ndarray, mass: np.ndarray, depth: int) -> tuple[np.ndarray, np.ndarray]:
    """`SumTree.sample` in NumPy. If one child is zero, the other one is taken even if rounding says otherwise."""
    top = depth // 2
    level = nodes[1 << top:2 << top]
    after = np.cumsum(level)
    place = np.minimum(np.searchsorted(after, mass, side="right"), np.flatnonzero(level)[-1])
    mass = mass - np.where(place > 0, after[place - 1], 0.0)
    node = place + (1 << top)
    for _ in range(depth - top):
        left = nodes[2 * node]
        right = (mass >= left) & (nodes[2 * node + 1] > 0)
        mass = mass - np.where(right, left, 0.0)
        node = 2 * node + right
    return node, nodes[node]


@jit
def set_compiled(nodes: np.ndarray, node: np.ndarray, values: np.ndarray, depth: int) -> None:
    """`SumTree.set` as compiled loops. Overwrites `node`."""
    for i in range(len(node)):
        nodes[node[i]] = values[i]
    for _ in range(depth):
        for i in range(len(node)):
            # From some level on neighbouring nodes have the same parent: compute it once.
            parent = node[i] >> 1
            node[i] = parent
            if i == 0 or node[i - 1] != parent:
                nodes[parent] = nodes[2 * parent] + nodes[2 * parent + 1]


@jit
def change_compiled(nodes: np.ndarray, node: np.ndarray, values: np.ndarray, depth: int) -> None:
    """`SumTree.change` as compiled loops. Overwrites `node` and `values`."""
    for i in range(len(node)):
        if nodes[node[i]] == 0:
            values[i] = 0.0
    set_compiled(nodes, node, values, depth)


@jit
def sample_compiled(nodes: np.ndarray, mass: np.ndarray, depth: int) -> tuple[np.ndarray, np.ndarray]:
    """`SumTree.sample` as compiled loops. Overwrites `mass`."""
    top = depth // 2
    final = (2 << top) - 1
    while nodes[final] == 0:
        final -= 1
    place, before, after = 1 << top, 0.0, nodes[1 << top]
    node = np.empty(len(mass), np.int64)
    for i in range(len(mass)):
        while mass[i] >= after and place < final:
            place += 1
            before, after = after, after + nodes[place]
        node[i] = place
        mass[i] -= before
    for _ in range(depth - top):
        for i in range(len(mass)):
            left = nodes[2 * node[i]]
            right = (mass[i] >= left) & (nodes[2 * node[i] + 1] > 0)
            mass[i] -= left * right
            node[i] = 2 * node[i] + right
    return node, nodes[node]


_set = set_compiled if HAS_NUMBA else set_levelwise
_change = change_compiled if HAS_NUMBA else change_levelwise
_sample = sample_compiled if HAS_NUMBA else sample_levelwise
