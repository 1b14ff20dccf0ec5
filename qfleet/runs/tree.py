"""A tree of state as a JSON document plus named arrays: every type and bit survives, and nothing is pickled.

What JSON cannot say is an object with a single key that begins with `$`:

    {"$tensor": NAME}  {"$array": NAME}  {"$scalar": NAME}     the array NAME as torch tensor, numpy array, numpy scalar
    {"$tuple": [...]}  {"$float": "nan"}                       a tuple; a float that is not finite
    {"$items": [[key, value], ...]}                            a dict with integer keys, or with keys like these here
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

Arrays = dict[str, torch.Tensor]

_NOT_FINITE = ("nan", "inf", "-inf")


def pack(tree: Any) -> tuple[Any, Arrays]:
    """Split a tree of dict, list, tuple, str, int, float, bool, None, numpy and torch values into JSON and arrays.

    Arrays are copied (to the CPU), so the tree may change afterwards. Anything else raises TypeError with its place.
    """
    arrays: Arrays = {}
    return _pack(tree, "", arrays), arrays


def unpack(document: Any, arrays: Arrays) -> Any:
    """The tree again; `unpack(*pack(tree))` equals `tree`. A document that `pack` cannot have made is a ValueError."""
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
    """A contiguous copy on the CPU with memory of its own: what the safetensors format can hold."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone(memory_format=torch.contiguous_format)
    try:
        return torch.from_numpy(np.array(value, order="C"))
    except (TypeError, ValueError) as error:  # objects, strings, dates, a foreign byte order
        raise TypeError(f"state{place}: an array of {np.asarray(value).dtype} cannot be saved") from error


def _pack(node: Any, place: str, arrays: Arrays) -> Any:
    if node is None or type(node) in (bool, int, str):
        return node
    if type(node) is float:
        return node if math.isfinite(node) else {"$float": str(node)}
    if isinstance(node, dict):
        return _pack_dict(node, place, arrays)
    if type(node) in (list, tuple):
        items = [_pack(item, f"{place}/{index}", arrays) for index, item in enumerate(node)]
        return items if type(node) is list else {"$tuple": items}
    if isinstance(node, torch.Tensor | np.ndarray | np.generic):
        name = f"{len(arrays)}:{place.lstrip('/')}"
        arrays[name] = dense(node, place)
        return {_tag(node): name}
    raise TypeError(f"state{place}: a {type(node).__name__} cannot be saved")


def _tag(node: torch.Tensor | np.ndarray | np.generic) -> str:
    if isinstance(node, torch.Tensor):
        return "$tensor"
    return "$array" if isinstance(node, np.ndarray) else "$scalar"


def _pack_dict(node: dict[Any, Any], place: str, arrays: Arrays) -> Any:
    items = [(key, _pack(value, f"{place}/{key}", arrays)) for key, value in node.items()]
    if all(type(key) is str and not key.startswith("$") for key in node):
        return dict(items)
    if not all(type(key) in (str, int) for key in node):
        raise TypeError(f"state{place}: keys must be strings or integers, not {sorted(map(repr, node))}")
    return {"$items": [list(item) for item in items]}


def _untag(tag: str, value: Any, arrays: Arrays) -> Any:
    if tag == "$float" and value in _NOT_FINITE:
        return float(value)
    if tag == "$tuple" and isinstance(value, list):
        return tuple(unpack(item, arrays) for item in value)
    if tag == "$items" and isinstance(value, list):
        return dict(_item(pair, arrays) for pair in value)
    if tag in ("$tensor", "$array", "$scalar") and isinstance(value, str) and value in arrays:
        array = arrays[value]
        if tag == "$tensor":
            return array
        return array.numpy() if tag == "$array" else array.numpy()[()]
    raise ValueError(f"{tag} cannot hold {value!r:.80}")


def _item(pair: Any, arrays: Arrays) -> tuple[str | int, Any]:
    if not isinstance(pair, list) or len(pair) != 2 or type(pair[0]) not in (str, int):
        raise ValueError(f"not a key and a value: {pair!r:.80}")
    return pair[0], unpack(pair[1], arrays)
