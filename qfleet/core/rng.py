"""Generators of chance, from one device to another."""

from __future__ import annotations

import zlib

import torch


def restore_rng(generator: torch.Generator, state: torch.Tensor) -> None:
    """Go on with a generator's saved state; on another kind of device, whose states differ, with a seed from it."""
    try:
        generator.set_state(state)
    except RuntimeError:
        generator.manual_seed(zlib.crc32(state.numpy().tobytes()))
