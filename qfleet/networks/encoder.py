"""Encoder of observation leaves to one feature vector: torsos for images, one-hot categories, vectors unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from qfleet.core.env import Leaf
from qfleet.networks.norms import Norm
from qfleet.networks.patch_conv import SpaceToDepthConv2d
from qfleet.networks.torsos import find_torso


class Encoder(nn.Module):
    """{leaf: [B, ...]} -> [B, features]. uint8 images are scaled to [0, 1]; computes in `dtype`."""

    def __init__(self, observation: Mapping[str, Leaf], torso: str, norm: Norm, **options: Any) -> None:
        """Build one torso per image leaf; `options` are passed to the torso's builder."""
        super().__init__()
        self.leaves = dict(observation)
        builders = {name: find_torso(default_torso(leaf) if torso == "auto" else torso)
                    for name, leaf in self.leaves.items() if leaf.kind == "image"}
        self.names = {name: f"torso_{i}" for i, name in enumerate(builders)}
        for name, builder in builders.items():
            self.add_module(self.names[name], builder(self.leaves[name].shape, norm, **options))
        with torch.no_grad():
            blank = {name: torch.zeros(1, *leaf.shape, dtype=getattr(torch, leaf.dtype))
                     for name, leaf in self.leaves.items()}
            self.features = self(blank, torch.float32).shape[1]

    def forward(self, obs: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        parts = [self._leaf(name, leaf, obs[name], dtype) for name, leaf in self.leaves.items()]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def prepare(self, obs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Observations with images in the first layer's layout (GPU only), to be shared by several passes.

        Networks with equal first layers can read the same result, so the conversion is done once.
        """
        found = dict(obs)
        for name, torso in self.names.items():
            layer = first_layer(self.get_submodule(torso))
            if found[name].is_cuda and found[name].dtype == torch.uint8 and isinstance(layer, SpaceToDepthConv2d):
                found[name] = layer.prepare(found[name])
        return found

    def _leaf(self, name: str, leaf: Leaf, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if leaf.kind == "category":
            columns = _rows(x)
            ones = [columns[:, i, None] == torch.arange(n, device=x.device) for i, n in enumerate(leaf.sizes)]
            return torch.cat(ones, 1).to(dtype)
        if leaf.kind == "vector":
            return _rows(x).to(dtype)
        torso = self.get_submodule(self.names[name])
        features: torch.Tensor = torso(self._pixels(torso, leaf, x, dtype))
        return features

    def _pixels(self, torso: nn.Module, leaf: Leaf, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Input of a torso: scaled floats, channels last on a GPU; or raw bytes if the first layer reads them."""
        if leaf.dtype == "uint8" and x.is_cuda and isinstance(first_layer(torso), SpaceToDepthConv2d):
            return x  # already prepared, or prepared by the layer itself
        pixels = x.to(dtype).mul_(1 / 255) if leaf.dtype == "uint8" else x.to(dtype)
        return pixels.contiguous(memory_format=torch.channels_last) if x.is_cuda else pixels


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[B, ...] -> [B, N], for any B: an exported network must not fix the batch size it was traced with."""
    return x.flatten(1) if x.ndim > 1 else x.unsqueeze(1)


def first_layer(torso: nn.Module) -> nn.Module | None:
    return next(iter(torso.children()), None)


def default_torso(leaf: Leaf) -> str:
    """`nature` for images large enough for its strides, else `small`."""
    return "nature" if min(leaf.shape[1:]) >= 36 else "small"
