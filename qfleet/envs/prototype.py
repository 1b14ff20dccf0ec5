"""Environments given as Python objects: the name by which a config refers to them."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium
from gymnasium.vector import VectorEnv

from qfleet.config.objects import reference_to
from qfleet.core.errors import UserError


class Prototype:
    """Copies of an environment instance, as it was when it was given: every lane needs an environment of its own."""

    def __init__(self, env: gymnasium.Env[Any, Any] | VectorEnv[Any, Any, Any]) -> None:
        self.name = env_name(env)
        try:
            self._original: Any = copy.deepcopy(env)
        except Exception as error:
            if isinstance(env, VectorEnv) or env.spec is None:
                raise UserError(f"the environment {self.name} cannot be copied, and the run needs several, one of them "
                                f"for evaluations ({type(error).__name__}: {error}): pass its class or a function that "
                                "creates it, such as env=lambda: MyEnv()") from None
            self._original = None
            self._spec = copy.deepcopy(env.spec)

    def __call__(self) -> Any:
        return gymnasium.make(self._spec) if self._original is None else copy.deepcopy(self._original)


def env_name(env: gymnasium.Env[Any, Any] | VectorEnv[Any, Any, Any]) -> str:
    """Registered id of an environment, else the name of its class without wrappers."""
    return env.spec.id if env.spec is not None else type(env.unwrapped).__name__


def env_reference(env: Any) -> str:
    """Name of an environment for `env.id`: of an id, a class, a function that creates it, or an instance."""
    if isinstance(env, str):
        return env
    if isinstance(env, gymnasium.Env | VectorEnv):
        prototype = Prototype(env)
        return reference_to(env, prototype, prototype.name)
    if callable(env):
        return reference_to(env)
    raise UserError(f"env={env!r}: must be an environment id, a gymnasium.Env or VectorEnv, its class, or a function "
                    "that creates it")
