"""Spaces survive as JSON, and what is no description of a space is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
from gymnasium import spaces

from qfleet.envs.stored_spaces import MOST_BOUNDS, spaces_from_json, spaces_to_json

TWO = spaces.Discrete(2)
SPACES = [
    spaces.Box(-1, 1, (3,)), spaces.Box(-np.inf, np.inf, (3,), np.float64), spaces.Box(0.1, 0.7, ()),
    spaces.Box(np.array([0, -np.inf], np.float32), np.array([1, 5], np.float32)), spaces.Box(0, 1, (0,)),
    spaces.Box(0, 255, (4, 4, 3), np.uint8), spaces.Box(-5, 2**40, (2,), np.int64), spaces.Box(0, 1, (2,), np.bool_),
    spaces.Discrete(3, start=-1), spaces.MultiDiscrete([2, 3], start=[1, 5]),
    spaces.MultiDiscrete(np.array([[2, 3], [4, 5]]), dtype=np.int32), spaces.MultiBinary(3), spaces.MultiBinary((2, 3)),
    spaces.Tuple([TWO, spaces.Box(0, 1, (1,))]),
    spaces.Dict([("b", TWO), ("a", spaces.Dict({"x": spaces.MultiBinary(2)}))])]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_a_space_is_read_as_it_was_stored(space):
    text = json.dumps(spaces_to_json(space, TWO), allow_nan=False)
    found, action = spaces_from_json(json.loads(text))
    assert found == space and found.dtype == space.dtype and str(found) == str(space) and action == TWO


def test_equal_bounds_are_stored_once():
    stored = spaces_to_json(spaces.Box(0, 255, (210, 160, 3), np.uint8), TWO)
    assert len(json.dumps(stored)) < 200


@pytest.mark.parametrize("space", [
    spaces.Dict([((1, 2), TWO)]), spaces.Sequence(TWO),
    spaces.Box(np.linspace(-1, 0, MOST_BOUNDS + 1, dtype=np.float32), np.float32(1))],
    ids=["key", "sequence", "bounds"])
def test_what_cannot_be_stored_is_left_out(space):
    assert spaces_to_json(space, TWO) is None


@pytest.mark.parametrize("damage", [
    {"type": "Pickle"}, {"type": "Box", "shape": [10**6, 10**6], "dtype": "float32", "low": 0, "high": 1},
    {"type": "Box", "shape": [2], "dtype": "O", "low": 0, "high": 1}, {"type": "Discrete", "n": 0, "start": 0},
    {"type": "Box", "shape": [2], "dtype": "float32", "low": [0], "high": 1}, {}, None, [], {"type": "Tuple"},
    {"type": "Dict", "spaces": [[None, {"type": "Discrete", "n": 2, "start": 0}]]},
    {"type": "MultiDiscrete", "shape": [1], "dtype": "int64", "nvec": [10**30], "start": [0]}])
def test_other_data_is_refused(damage):
    with pytest.raises(ValueError, match=r".+"):
        spaces_from_json({"observation": damage, "action": {"type": "Discrete", "n": 2, "start": 0}})
