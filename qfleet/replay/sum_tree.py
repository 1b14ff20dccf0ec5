"""Sum tree: samples leaves in proportion to their values, and updates them, in logarithmic time."""

from __future__ import annotations

import numpy as np

from qfleet.core.jit import HAS_NUMBA, jit


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
