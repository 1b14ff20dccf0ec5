"""No convolutions: the picture is laid flat, and the dense layers after it do the work."""

from __future__ import annotations

from torch import nn

from qfleet.networks.norms import Norm


def build(shape: tuple[int, ...], norm: Norm) -> nn.Module:
    """[B, ...] -> [B, features]."""
    return nn.Flatten()
