"""Independent seeds for each purpose, index and lane, derived from the run's seed."""

from __future__ import annotations

import zlib

import numpy as np


def seed_for(seed: int, purpose: str, *index: int) -> int:
    """31-bit seed for one purpose ("learner", "actor", ...) and index of a run."""
    return lane_seeds(seed, 1, purpose, *index)[0]


def lane_seeds(seed: int, lanes: int, purpose: str, *index: int) -> list[int]:
    """One distinct 31-bit seed per lane, small enough for every emulator."""
    sequence = np.random.SeedSequence([seed, zlib.crc32(purpose.encode()), *index])
    return [int(word) & 0x7FFFFFFF for word in sequence.generate_state(lanes, np.uint32)]
