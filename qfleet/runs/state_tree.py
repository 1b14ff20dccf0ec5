"""State trees as a JSON document plus named arrays: types and bits are preserved, and nothing is pickled.

Values that JSON cannot express are objects with a single key that begins with `$`:

    {"$tensor": NAME}  {"$array": NAME}  {"$scalar": NAME}     the array NAME as torch tensor, numpy array, numpy scalar
    {"$tuple": [...]}  {"$float": "nan"}                       a tuple; a float that is not finite
    {"$items": [[key, value], ...]}                            a dict with integer keys, or with keys that begin with $

Equal arrays share one NAME: a run holds its weights several times, in the learner, as published, and in the actor.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

Arrays = dict[str, torch.Tensor]

_NOT_FINITE = ("nan", "inf", "-inf")


class _ArrayPool:
    """Arrays by name, each content once. Arrays that are in `known` are referred to by name and not stored."""

    def __init__(self, known: Mapping[str, torch.Tensor]) -> None:
        self.arrays: Arrays = {}
        self._names = {_content(array): name for name, array in known.items()}

    def put(self, array: torch.Tensor, place: str) -> str:
        content = _content(array)
        if content not in self._names:
            self._names[content] = name = f"{len(self.arrays)}:{place.lstrip('/')}"
            self.arrays[name] = array
        return self._names[content]


def _content(array: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    """Key by which two dense arrays are bitwise equal: NaN equals itself, and 0 differs from -0."""
    data: Any = array.reshape(-1).view(torch.uint8).numpy() if array.numel() else b""  # empty arrays: any strides
    return array.dtype, array.shape, hashlib.sha256(data).digest()


def pack(tree: Any, known: Mapping[str, torch.Tensor] | None = None) -> tuple[Any, Arrays]:
    """Split a tree of dict, list, tuple, str, int, float, bool, None, numpy and torch values into JSON and arrays.

    Arrays are copied (to the CPU), so the tree may change afterwards. Any other type raises TypeError with its path.
    Arrays equal to one in `known` are referred to by its name and not returned. `known` holds dense arrays, under names
    that do not have the form NUMBER:PATH used here.
    """
    pool = _ArrayPool(known or {})
    return _pack(tree, "", pool), pool.arrays


def unpack(document: Any, arrays: Mapping[str, torch.Tensor]) -> Any:
    """Restore the tree: `unpack(*pack(tree))` equals `tree`. ValueError for a document that is not from `pack`.

    No two parts of the result share memory, even if they share an array on disk.
    """
    if isinstance(document, list):
        return [unpack(item, arrays) for item in document]
    if not isinstance(document, dict):
        return document
    if any(key.startswith("$") for key in document):
        if len(document) != 1:
            raise ValueError(f"a tagged object has one key, not {sorted(document)}")
        return _untag(*next(iter(document.items())), arrays)
    return {key: unpack(value, arrays) for key, value in document.items()}


def dense(value: torch.Tensor | np.ndarray | np.generic, place: str = "") -> torch.Tensor:
    """Return a contiguous copy on the CPU with its own memory, as the safetensors format requires."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone(memory_format=torch.contiguous_format)
    try:
        return torch.from_numpy(np.array(value, order="C"))
    except (TypeError, ValueError) as error:  # objects, strings, dates, a foreign byte order
        raise TypeError(f"state{place}: an array of {np.asarray(value).dtype} cannot be saved") from error


def _pack(node: Any, place: str, pool: _ArrayPool) -> Any:
    if node is None or type(node) in (bool, int, str):
        return node
    if type(node) is float:
        return node if math.isfinite(node) else {"$float": str(node)}
    if isinstance(node, dict):
        return _pack_dict(node, place, pool)
    if type(node) in (list, tuple):
        items = [_pack(item, f"{place}/{index}", pool) for index, item in enumerate(node)]
        return items if type(node) is list else {"$tuple": items}
    if isinstance(node, torch.Tensor | np.ndarray | np.generic):
        return {_tag(node): pool.put(dense(node, place), place)}
    raise TypeError(f"state{place}: a {type(node).__name__} cannot be saved")


def _tag(node: torch.Tensor | np.ndarray | np.generic) -> str:
    if isinstance(node, torch.Tensor):
        return "$tensor"
    return "$array" if isinstance(node, np.ndarray) else "$scalar"


def _pack_dict(node: dict[Any, Any], place: str, pool: _ArrayPool) -> Any:
    items = [(key, _pack(value, f"{place}/{key}", pool)) for key, value in node.items()]
    if all(type(key) is str and not key.startswith("$") for key in node):
        return dict(items)
    if not all(type(key) in (str, int) for key in node):
        raise TypeError(f"state{place}: keys must be strings or integers, not {sorted(map(repr, node))}")
    return {"$items": [list(item) for item in items]}


def _untag(tag: str, value: Any, arrays: Mapping[str, torch.Tensor]) -> Any:
    if tag == "$float" and value in _NOT_FINITE:
        return float(value)
    if tag == "$tuple" and isinstance(value, list):
        return tuple(unpack(item, arrays) for item in value)
    if tag == "$items" and isinstance(value, list):
        return dict(_item(pair, arrays) for pair in value)
    if tag in ("$tensor", "$array", "$scalar") and isinstance(value, str) and value in arrays:
        array = arrays[value].clone()
        if tag == "$tensor":
            return array
        return array.numpy() if tag == "$array" else array.numpy()[()]
    raise ValueError(f"{tag} cannot hold {value!r:.80}")


def _item(pair: Any, arrays: Mapping[str, torch.Tensor]) -> tuple[str | int, Any]:
    if not isinstance(pair, list) or len(pair) != 2 or type(pair[0]) not in (str, int):
        raise ValueError(f"not a key and a value: {pair!r:.80}")
    return pair[0], unpack(pair[1], arrays)
