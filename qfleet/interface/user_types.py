"""Types of the objects that users pass to the Python API."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
from gymnasium.vector import VectorEnv

from qfleet.training.meter import Sink

AnyEnv = gymnasium.Env[Any, Any] | VectorEnv[Any, Any, Any]
"""A Gymnasium environment or vector environment."""

EnvLike = str | Mapping[str, Any] | AnyEnv | Callable[..., AnyEnv]
"""An environment: an id, keys of the env section, an instance, a class, or a function that creates one."""

WrapperFn = str | Callable[..., gymnasium.Env[Any, Any]]
"""A wrapper class, a function of an environment, or a name `module:attribute`."""

WrapperLike = WrapperFn | Mapping[str, Any] | tuple[WrapperFn, Mapping[str, Any]]
"""A wrapper, also with keyword arguments: as a pair, or as a mapping with one key."""

SinkLike = Sink | Callable[[Mapping[str, Any]], object]
"""Receiver of metric records: an object with write(record), flush() and close(), or a function of a record."""
