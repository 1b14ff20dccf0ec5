"""Encoder of observation leaves to one feature vector: torsos for images, one-hot categories, vectors unchanged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from qfleet.accel.kernels.images import image_input, symbol_planes
from qfleet.core.env import Leaf
from qfleet.networks.custom_encoder import CustomEncoder, require_torso
from qfleet.networks.norms import Norm
from qfleet.networks.patch_conv import SpaceToDepthConv2d
from qfleet.networks.torsos import find_torso

BYTE = 255
"""Divisor of the images that a convolution can read as bytes."""


class Encoder(nn.Module):
    """{leaf: [B, ...]} -> [B, features]. Images are scaled, symbols one-hot encoded; computes in `dtype`."""

    def __init__(self, observation: Mapping[str, Leaf], torso: str, norm: Norm, **options: Any) -> None:
        """Build one torso per image leaf; `options` are passed to the torso's builder."""
        super().__init__()
        self.leaves = dict(observation)
        builders = {name: find_torso(default_torso(leaf) if torso == "auto" else torso)
                    for name, leaf in self.leaves.items() if leaf.kind == "image"}
        self.names = {name: f"torso_{i}" for i, name in enumerate(builders)}
        for name, builder in builders.items():
            shape = _planes(self.leaves[name])
            module = builder(shape, norm, **options)
            if ":" in torso:
                require_torso(torso, module, shape)
            self.add_module(self.names[name], module)
        with torch.no_grad():
            blank = {name: torch.zeros(1, *leaf.shape, dtype=getattr(torch, leaf.dtype))
                     for name, leaf in self.leaves.items()}
            self.features = self(blank, torch.float32).shape[1]

    def forward(self, obs: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        parts = [self._leaf(name, leaf, obs[name], dtype) for name, leaf in self.leaves.items()]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _leaf(self, name: str, leaf: Leaf, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if leaf.kind == "category":
            columns = _rows(x)
            ones = [columns[:, i, None] == torch.arange(n, device=x.device) for i, n in enumerate(leaf.sizes)]
            return torch.cat(ones, 1).to(dtype)
        if leaf.kind == "vector":
            return _rows(x).to(dtype)
        torso = self.get_submodule(self.names[name])
        if leaf.symbols:
            image = symbol_planes(x, leaf.symbols, dtype)
        else:
            reads_bytes = leaf.divisor == BYTE and isinstance(first_layer(torso), SpaceToDepthConv2d)
            image = image_input(x, dtype, leaf.divisor, leaf.dtype == "uint8" and reads_bytes)
        features: torch.Tensor = torso(image)
        return features


def _planes(leaf: Leaf) -> tuple[int, ...]:
    """Shape of an image as its torso reads it."""
    channels, *size = leaf.shape
    return (channels * max(1, leaf.symbols), *size)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[B, ...] -> [B, N], for any B: an exported network must not fix the batch size it was traced with."""
    return x.flatten(1) if x.ndim > 1 else x.unsqueeze(1)


def first_layer(torso: nn.Module) -> nn.Module | None:
    return next(iter(torso.children()), None)


def default_torso(leaf: Leaf) -> str:
    """`nature` for images large enough for its strides, else `small`."""
    return "nature" if min(leaf.shape[1:]) >= 36 else "small"


AnyEncoder = Encoder | CustomEncoder
MakeEncoder = Callable[[Mapping[str, Leaf]], AnyEncoder]
"""Builds an encoder for observation leaves; each of an agent's networks has its own."""


def encoder_factory(cfg: Any, norm: Norm | None = None) -> MakeEncoder:
    """Factory for the encoder that an agent's section describes; `norm` replaces `cfg.norm`.

    Reads `encoder` and `encoder_kwargs` of a user's module, else `torso`, `norm` and, if the section has them,
    `torso_options`.
    """
    if cfg.encoder != "auto":
        return partial(CustomEncoder, name=cfg.encoder, kwargs=cfg.encoder_kwargs)
    return partial(Encoder, torso=cfg.torso, norm=cfg.norm if norm is None else norm,
                   **getattr(cfg, "torso_options", {}))
