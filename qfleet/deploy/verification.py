"""Comparison of an exported policy with the policy itself, at several batch sizes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from qfleet.core.agent import LAST_REWARD
from qfleet.core.errors import ExportError
from qfleet.deploy.policy_graph import NEXT, PolicyGraph
from qfleet.deploy.value_info import Arrays

BATCH_SIZES = (1, 2, 7)
STEPS = 4
"""Steps of a recurrent policy, each with the state that the previous one returned."""

TOLERANCE = 1e-4
"""Largest difference of an output, as a fraction of its largest value (at least 1)."""


def largest_difference(graph: PolicyGraph, run: Callable[[Arrays], Arrays]) -> float:
    """Largest difference between the floats that `run` and the policy compute; ExportError if it is too large.

    Actions must be equal, except in lanes whose two largest values differ by no more than the tolerance.
    """
    largest = 0.0
    for lanes in BATCH_SIZES:
        inputs = graph.sample(lanes, seed=lanes)
        for step in range(STEPS if graph.state_names else 1):
            expected = graph.reference(inputs)
            largest = max(largest, _compare(expected, run(inputs), lanes))
            following = {name.removeprefix(NEXT): value for name, value in expected.items() if name.startswith(NEXT)}
            inputs = inputs | graph.sample(lanes, seed=100 * lanes + step) | following
            if LAST_REWARD in inputs:
                inputs[LAST_REWARD] = np.linspace(-1, 1, lanes, dtype=np.float32)
    return largest


def _compare(expected: Arrays, found: Arrays, lanes: int) -> float:
    largest, clear = 0.0, _clear_lanes(expected, lanes)
    for name, value in expected.items():
        other = found[name]
        if other.shape != value.shape or other.dtype != value.dtype:
            raise ExportError(f"output {name} is {other.dtype} {other.shape} at batch size {lanes}, and the policy's "
                              f"is {value.dtype} {value.shape}")
        if value.dtype.kind != "f":
            rows = clear if value.shape[:1] == (lanes,) else slice(None)
            if (other[rows] != value[rows]).any():
                raise ExportError(f"output {name} differs from the policy's at batch size {lanes}")
            continue
        if not np.isfinite(value).all():
            raise ExportError(f"the policy's {name} is NaN or infinite for random observations")
        limit, difference = _limit(value), float(np.abs(other.astype(np.float64) - value).max(initial=0.0))
        if not difference <= limit:
            raise ExportError(f"output {name} differs from the policy's by {difference:.2g} at batch size {lanes}; the "
                              f"limit is {limit:.2g}")
        largest = max(largest, difference)
    return largest


def _limit(value: np.ndarray) -> float:
    return TOLERANCE * max(1.0, float(np.abs(value).max(initial=0.0)))


def _clear_lanes(expected: Arrays, lanes: int) -> np.ndarray:
    """Bool [N]: lanes in which rounding cannot change the greedy action."""
    q = expected.get("q")
    if q is None or q.shape[1] < 2:
        return np.ones(lanes, bool)
    second, first = np.partition(q, -2, axis=1)[:, -2:].T
    return np.asarray(first - second > 2 * _limit(q))
