"""Restoring of random generators."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def restore_rng(generator: torch.Generator, state: torch.Tensor) -> None:
    """Restore a saved generator state. A state from another device type, which has a different
    format, is used as a seed instead.
    """
    try:
        generator.set_state(state)
    except RuntimeError:
        generator.manual_seed(zlib.crc32(state.numpy().tobytes()))


def restore_numpy_rng(generator: np.random.Generator, state: Mapping[str, Any]) -> None:
    """Restore a saved `generator.bit_generator.state`."""
    generator.bit_generator.state = state
