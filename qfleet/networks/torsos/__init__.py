"""Torsos turn an image leaf into features. A file here is a torso: `build(shape, norm) -> nn.Module`.

The module maps [B, *shape] (already scaled to [0, 1]) to [B, features], each item by itself and nothing by chance:
parts of a batch pass it at once, unless it has buffers. A torso may take options of its own, which the agent's config
passes on.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Annotated, Any

from torch import nn

from qfleet.config import PluginName, load_attribute

Torso = Annotated[str, PluginName(__name__, ("auto",))]
"""A field of an agent's config that names a torso; `auto` leaves the choice to the encoder."""


def find_torso(name: str) -> Callable[..., nn.Module]:
    """The builder of a torso named by file or by `module:attribute`."""
    if ":" in name:
        builder: Any = load_attribute(name)
        return getattr(builder, "build", builder)
    PluginName(__name__).check(name)
    return importlib.import_module(f"{__name__}.{name}").build
