"""Packages that are imported when an id names one of their environments, and the extras that install packages."""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium

from qfleet.core.errors import UserError

EXTRAS = {"box2d": ("Box2D", "box2d"), "minigrid": ("minigrid", "minigrid"), "minatar": ("minatar", "minatar"),
          "mujoco": ("mujoco", "mujoco"), "ale_py": ("ale-py", "atari"), "cv2": ("OpenCV", "atari"),
          "pygame": ("pygame", "video")}
"""Lower-case module name -> name of the package and the extra that installs it."""

PRINTING = ("BabyAI-",)
"""Prefixes of ids whose environments print a line at many resets."""


@dataclass(frozen=True)
class Package:
    """Module that registers the ids with these prefixes, by `register` or when it is imported."""

    module: str
    prefixes: tuple[str, ...]
    register: Callable[[Any], None] = lambda module: None


PACKAGES = (Package("minigrid", ("MiniGrid-", "BabyAI-")),
            Package("minatar.gym", ("MinAtar/",), lambda module: module.register_envs()))


def register_package(id: str) -> None:
    """Register the environments of the package that an id names; UserError if it is not installed."""
    for package in PACKAGES:
        if id.startswith(package.prefixes) and not any(known.startswith(package.prefixes)
                                                       for known in gymnasium.registry):
            try:
                package.register(importlib.import_module(package.module))
            except ModuleNotFoundError as error:
                raise UserError(missing_package(id, error)) from None


class QuietReset(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Discards what an environment prints in `reset`."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        with contextlib.redirect_stdout(io.StringIO()):
            return self.env.reset(seed=seed, options=options)


def quiet(id: str, env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
    """The environment, without its messages if it prints them at resets."""
    return QuietReset(env) if id.startswith(PRINTING) else env


def missing_package(name: str, error: Exception) -> str:
    """Message about an environment whose package is not installed; it names the extra, if one installs it."""
    missing = getattr(error, "name", None) or str(error).partition("not installed")[0]
    for module, (package, extra) in EXTRAS.items():
        if module in missing.casefold():
            return f"{name} needs {package}, which is not installed: pip install 'qfleet[{extra}]'"
    return f"{name} needs a package that is not installed: {error}"
