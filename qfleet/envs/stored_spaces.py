"""Gymnasium spaces as JSON, stored with the weights so that an agent acts without its environment's package.

    Box            shape, dtype, low, high     one number if all bounds are equal, else a flat list; "inf", "-inf"
    Discrete       n, start
    MultiDiscrete  nvec, start, shape, dtype   flat lists
    MultiBinary    shape
    Text                                       without its length and characters: agents do not read text
    Tuple, Dict    spaces                      of a Dict: pairs of key and space, in its order
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from qfleet.envs.spaces import is_text

MOST_BOUNDS = 100_000
"""Bounds of a space that are stored one by one: the manifest of a checkpoint must stay small."""

MOST_ENTRIES = 2**27
"""Entries of a stored space that is read: a foreign file must not exhaust the memory."""


class NotStorable(ValueError):
    """A space that cannot be stored: its agent needs the environment to convert observations and actions."""


def spaces_to_json(observation: spaces.Space[Any], action: spaces.Space[Any]) -> dict[str, Any] | None:
    """Both spaces of an environment as JSON; None if one of them cannot be stored."""
    try:
        return {"observation": _to_json(observation), "action": _to_json(action)}
    except NotStorable:
        return None


def spaces_from_json(data: Mapping[str, Any]) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
    """Observation and action space; ValueError if the data was not written by `spaces_to_json`."""
    try:
        return _from_json(data["observation"]), _from_json(data["action"])
    except (KeyError, TypeError, AttributeError, AssertionError, OverflowError, RecursionError, MemoryError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _to_json(space: spaces.Space[Any]) -> dict[str, Any]:
    match space:
        case spaces.Box():
            return {"type": "Box", "shape": list(space.shape), "dtype": space.dtype.name,
                    "low": _bounds_to_json(space.low), "high": _bounds_to_json(space.high)}
        case spaces.Discrete():
            return {"type": "Discrete", "n": int(space.n), "start": int(space.start)}
        case spaces.MultiDiscrete():
            return {"type": "MultiDiscrete", "shape": list(space.nvec.shape), "dtype": space.dtype.name,
                    "nvec": space.nvec.ravel().tolist(), "start": space.start.ravel().tolist()}
        case spaces.MultiBinary():
            return {"type": "MultiBinary", "shape": list(space.shape)}  # (3,) and 3 are the same space
        case spaces.Tuple():
            return {"type": "Tuple", "spaces": [_to_json(part) for part in space.spaces]}
        case spaces.Dict():
            return {"type": "Dict", "spaces": [[_key(key), _to_json(part)] for key, part in space.spaces.items()]}
    if is_text(space):
        return {"type": "Text"}
    raise NotStorable(str(space))


def _key(key: Any) -> str | int:
    if isinstance(key, bool) or not isinstance(key, str | int):
        raise NotStorable(f"key {key!r}")
    return key


def _bounds_to_json(bounds: np.ndarray) -> Any:
    if bounds.size and (bounds == bounds.flat[0]).all():
        return _number_to_json(bounds.flat[0].item())
    if bounds.size > MOST_BOUNDS:
        raise NotStorable(f"{bounds.size} bounds")
    return [_number_to_json(bound) for bound in bounds.ravel().tolist()]


def _number_to_json(number: float) -> float | str:
    return number if math.isfinite(number) else str(number)  # JSON has no infinity


def _from_json(data: Mapping[str, Any]) -> spaces.Space[Any]:
    kind = data["type"]
    if kind == "Discrete":
        return spaces.Discrete(int(data["n"]), start=int(data["start"]))
    if kind == "Text":
        return spaces.Text(1)
    if kind == "Tuple":
        return spaces.Tuple([_from_json(part) for part in data["spaces"]])
    if kind == "Dict":  # as pairs, since the keys of a mapping would be sorted
        pairs: list[Any] = [(_key(key), _from_json(part)) for key, part in data["spaces"]]
        return spaces.Dict(pairs)
    shape = tuple(int(size) for size in data["shape"])
    if any(size < 0 for size in shape) or math.prod(shape) > MOST_ENTRIES:
        raise ValueError(f"shape {shape}")
    if kind == "MultiBinary":
        return spaces.MultiBinary(shape if len(shape) != 1 else shape[0])
    dtype = np.dtype(data["dtype"])
    if dtype.kind not in "fiub":
        raise ValueError(f"dtype {dtype}")
    if kind == "MultiDiscrete":
        nvec, start = (np.reshape(np.array(data[name], dtype), shape) for name in ("nvec", "start"))
        return spaces.MultiDiscrete(nvec, dtype=dtype.type, start=start)
    if kind == "Box":
        low, high = (_bounds_from_json(data[name], shape, dtype) for name in ("low", "high"))
        return spaces.Box(low, high, shape, dtype.type)
    raise ValueError(f"unknown space {kind!r}")


def _bounds_from_json(data: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    number = float if dtype.kind == "f" else int
    if isinstance(data, list):
        return np.reshape(np.array([number(bound) for bound in data], dtype), shape)
    return np.full(shape, number(data), dtype)
