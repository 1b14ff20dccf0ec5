"""Seeds that never collide: one stream per purpose, index and lane, all from the run's one seed."""

from __future__ import annotations

import zlib

import numpy as np


def seed_for(seed: int, purpose: str, *index: int) -> int:
    """A 31-bit seed for one purpose ("learner", "actor", ...) and index of a run."""
    return lane_seeds(seed, 1, purpose, *index)[0]


def lane_seeds(seed: int, lanes: int, purpose: str, *index: int) -> list[int]:
    """One 31-bit seed per lane: small enough for every emulator, distinct from lane to lane."""
    sequence = np.random.SeedSequence([seed, zlib.crc32(purpose.encode()), *index])
    return [int(word) & 0x7FFFFFFF for word in sequence.generate_state(lanes, np.uint32)]
