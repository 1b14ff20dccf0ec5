"""Torsos turn an image leaf into features. A file here is a torso: `build(shape, norm) -> nn.Module`.

The module maps [B, *shape] (already scaled to [0, 1]) to [B, features].
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

from torch import nn

from qfleet.config import load_attribute
from qfleet.types import UserError


def torso_names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def find_torso(name: str) -> Callable[..., nn.Module]:
    """The builder of a torso named by file or by `module:attribute`."""
    if ":" in name:
        builder: Any = load_attribute(name)
        return getattr(builder, "build", builder)
    if name not in torso_names():
        raise UserError(f"agent.torso={name}: no such torso; there are {', '.join(torso_names())}, "
                        "or name your own as module:attribute")
    return importlib.import_module(f"{__name__}.{name}").build
