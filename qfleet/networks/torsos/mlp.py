"""Torso without convolutions: flattens the image for the dense layers of the head."""

from __future__ import annotations

from torch import nn

from qfleet.networks.norms import Norm


def build(shape: tuple[int, ...], norm: Norm) -> nn.Module:
    """[B, ...] -> [B, features]."""
    return nn.Flatten()
