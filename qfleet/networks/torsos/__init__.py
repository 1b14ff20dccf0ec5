"""Image torsos, one per file: `build(shape, norm) -> nn.Module`.

The module maps [B, *shape] (already scaled to [0, 1]) to [B, features], item by item and without randomness, because
a batch may be split and its parts computed concurrently, unless the torso has buffers. `build` may take further
options, which the agent's config passes on.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import Field
from torch import nn

from qfleet.config import Count, PluginName, PositiveCount, load_attribute

Torso = Annotated[str, PluginName(__name__, ("auto",)), Field(
    description="image network: auto (nature, or small below 36 pixels), a name of networks/torsos, or "
                "module:attribute")]
"""Config field that names a torso; with `auto` the encoder selects one."""

TorsoWidth = Annotated[PositiveCount, Field(description="factor by which torso=impala multiplies its channels")]
TorsoPool = Annotated[Count, Field(
    description="side to which torso=impala max-pools its features, pixels; 0 = no pooling")]
TorsoSpectralNorm = Annotated[bool, Field(
    description="spectral normalisation of the residual convolutions of torso=impala")]


def find_torso(name: str) -> Callable[..., nn.Module]:
    """Builder of a torso named by file or by `module:attribute`."""
    if ":" in name:
        builder: Any = load_attribute(name)
        return getattr(builder, "build", builder)
    PluginName(__name__).check(name)
    return importlib.import_module(f"{__name__}.{name}").build
