"""Environments given as Python objects: the name by which a config refers to them."""

from __future__ import annotations

import copy
import logging
from contextlib import suppress
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AsyncVectorEnv, VectorEnv

from qfleet.config.objects import reference_to
from qfleet.core.errors import UserError
from qfleet.envs.envpool import is_envpool

log = logging.getLogger("qfleet.envs")


class Prototype:
    """Creates copies of an environment instance, as it was when it was given: every lane needs one of its own.

    An instance that cannot be copied is created again from its registered id, if it has one.
    """

    def __init__(self, env: gymnasium.Env[Any, Any] | VectorEnv[Any, Any, Any]) -> None:
        self.name = env_name(env)
        self._original, self._spec = None, None
        try:
            if isinstance(env.unwrapped, AsyncVectorEnv):  # a copy of its pipes would close them
                raise TypeError("it has processes of its own")
            self._original = copy.deepcopy(env)
        except Exception as error:
            self._spec = _usable_spec(env)
            if self._spec is None:
                raise UserError(f"the environment {self.name} cannot be copied, and the run needs several, one of them "
                                f"for evaluations ({error}): pass its class or a function that creates it, such as "
                                f"{_example(env)}") from None
            log.warning("the environment %s cannot be copied (%s); its lanes are created by gymnasium.make, without "
                        "what was changed since", self.name, error)

    def __call__(self) -> Any:
        return copy.deepcopy(self._original) if self._spec is None else gymnasium.make(self._spec)


def env_name(env: gymnasium.Env[Any, Any] | VectorEnv[Any, Any, Any]) -> str:
    """Registered id of an environment, else the name of its class without wrappers."""
    return env.spec.id if isinstance(env.spec, EnvSpec) else type(env.unwrapped).__name__


def env_reference(env: Any) -> str:
    """Name of an environment for `env.id`: of an id, a class, a function that creates it, or an instance."""
    if isinstance(env, str):
        return env
    if isinstance(env, gymnasium.Env | VectorEnv):
        prototype = Prototype(env)
        return reference_to(env, prototype, prototype.name)
    if callable(env):
        return reference_to(env)
    raise UserError(f"env: {type(env).__name__} is neither an environment id, a gymnasium.Env or VectorEnv, its class, "
                    "nor a function that creates it")


def _example(env: Any) -> str:
    return "env=lambda num_envs: ..." if isinstance(env, VectorEnv) else f"env=lambda: {type(env).__name__}()"


def _usable_spec(env: Any) -> EnvSpec | None:
    """Spec from which an environment can be created again, or None."""
    if isinstance(env, gymnasium.Env) and isinstance(env.spec, EnvSpec) and not is_envpool(env):
        with suppress(Exception):
            spec = copy.deepcopy(env.spec)
            gymnasium.make(spec).close()
            return spec
    return None
