"""Environments and wrappers as arguments of the Python API, converted to the env section of a config."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv

from qfleet.config import load_attribute
from qfleet.config.objects import import_name, reference_to
from qfleet.core.errors import UserError
from qfleet.envs.prototype import env_reference

CONSTRUCTED = ("id", "kwargs", "wrappers")
"""Keys of the env section that can hold Python objects."""


def env_settings(env: Any, wrappers: Sequence[Any] | None = None) -> dict[str, Any]:
    """Settings of an environment and its wrappers: the env section, and for a vector environment the eval section."""
    section: dict[str, Any] = {}
    count = None
    if isinstance(env, Mapping):
        section = {name: plain(value) for name, value in env.items() if name not in CONSTRUCTED}
        count = _num_envs(env.get("id"))
        section |= _constructed(env.get("id"), env.get("kwargs"))
        wrappers = env.get("wrappers") if wrappers is None else wrappers
    elif env is not None:
        count = _num_envs(env)
        section = _constructed(env, None)
    if wrappers is not None:
        if isinstance(wrappers, str | Mapping) or not isinstance(wrappers, Sequence):
            raise UserError("wrappers: must be a list, such as [MyWrapper] or [(MyWrapper, {'factor': 0.5})]")
        section["wrappers"] = [_wrapper(wrapper) for wrapper in wrappers]
    if count is None:
        return {"env": section} if section else {}
    return {"env": {"lanes": count, "groups": 1} | section, "eval": {"lanes": count}}


def plain(value: Any) -> Any:
    """A value as a YAML file could contain it; functions and classes become names."""
    if isinstance(value, Mapping):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return reference_to(value) if callable(value) else value


def _num_envs(env: Any) -> int | None:
    return env.num_envs if isinstance(env, VectorEnv) else None


def _constructed(target: Any, kwargs: Any) -> dict[str, Any]:
    """`id` and `kwargs` of the env section, as far as they are given.

    Arguments that no YAML file could contain are bound to the class or function that takes them.
    """
    found: dict[str, Any] = {}
    if isinstance(target, functools.partial) and _is_named(target):
        target, kwargs = target.func, {**target.keywords, **(kwargs or {})}
    if isinstance(kwargs, Mapping) and not _is_plain(kwargs):
        if not callable(target):
            raise UserError(f"env.kwargs: {_first_object(kwargs)} cannot be written into a configuration: pass a "
                            "function that creates the environment, such as env=lambda: MyEnv(...)")
        target, kwargs = functools.partial(target, **kwargs), None
    if target is not None:
        found["id"] = env_reference(target)
    return found if kwargs is None else found | {"kwargs": plain(kwargs)}


def _wrapper(wrapper: Any) -> Any:
    """A wrapper as `env.wrappers` takes it: a name, or a name with keyword arguments."""
    if isinstance(wrapper, Mapping) and len(wrapper) == 1:
        wrapper = next(iter(wrapper.items()))
    if isinstance(wrapper, functools.partial) and _is_named(wrapper):
        wrapper = (wrapper.func, wrapper.keywords)
    if isinstance(wrapper, tuple) and len(wrapper) == 2 and isinstance(wrapper[1], Mapping):
        function, kwargs = wrapper
        if isinstance(function, str) or callable(function):
            if _is_plain(kwargs):
                return {_reference(function): plain(kwargs)}
            return reference_to(functools.partial(_loaded(function), **kwargs))
    if isinstance(wrapper, str) or callable(wrapper):
        return _reference(wrapper)
    raise UserError(f"wrappers: {type(wrapper).__name__} is neither a wrapper class, a function of an environment, a "
                    "name module:attribute, nor a pair of one of these and its keyword arguments")


def _reference(function: Any) -> str:
    return function if isinstance(function, str) else reference_to(function)


def _loaded(function: Any) -> Any:
    return load_attribute(function) if isinstance(function, str) else function


def _is_named(partial: functools.partial[Any]) -> bool:
    """True if the config can name the function of a partial and contain its arguments."""
    return not partial.args and import_name(partial.func) is not None and _is_plain(partial.keywords)


def _is_plain(value: Any) -> bool:
    """True for a value that a YAML file can contain."""
    if isinstance(value, Mapping):
        return all(isinstance(name, str) and _is_plain(inner) for name, inner in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | np.generic | Path)


def _first_object(kwargs: Mapping[str, Any]) -> str:
    name = next(str(name) for name, value in kwargs.items() if not _is_plain(value))
    return f"{name}, a {type(kwargs[name]).__name__},"
