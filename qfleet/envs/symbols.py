"""Trial of an environment that tells images of symbols, such as the objects of a grid, from images of colours.

Both may have a space of bytes, 0..255. Values that stay below `MOST_SYMBOLS` are taken for symbols.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from qfleet.envs.images import MOST_SYMBOLS, ImageFormat, image_layout
from qfleet.envs.leaf_reader import LeafReader
from qfleet.envs.spaces import ObservationEncoder

STEPS, EPISODE_STEPS, SEED = 300, 100, 1234
"""Random steps of a trial, steps after which it starts another episode, and its seed."""

FEWEST = 16
"""Smallest number of symbols that is assumed: a trial may not show all of them."""


def find_symbols(build: Callable[[], gymnasium.Env[Any, Any]], space: spaces.Space[Any], image_format: ImageFormat
                 ) -> dict[str, int]:
    """Number of symbols of each image that holds symbols.

    The numbers of spaces that list few values are exact. Only pictures of few pixels need a trial, which stops at the
    first value that is too large for a symbol; then the number is 16 or 32, so that it does not depend on chance.
    """
    encoder = ObservationEncoder(space, image_format)
    found = {name: leaf.symbols for name, leaf in encoder.leaves.items() if leaf.symbols}
    unknown = [reader for reader in encoder.readers if _is_small_picture(reader.extract(space), reader)]
    if not unknown:
        return found
    largest = _largest_values(build, unknown)
    return found | {name: FEWEST if value < FEWEST else MOST_SYMBOLS for name, value in largest.items()
                    if value < MOST_SYMBOLS}


def _is_small_picture(space: spaces.Space[Any], reader: LeafReader) -> bool:
    layout = image_layout(space)
    return layout is not None and layout.kind == "picture" and layout.may_hold_symbols and not reader.resized


def _largest_values(build: Callable[[], gymnasium.Env[Any, Any]], readers: list[LeafReader]) -> dict[str, int]:
    """Largest value of every leaf; if the environment fails the trial ends, and the run reports the failure."""
    largest: dict[str, int] = {}
    with suppress(Exception), closing(build()) as env:
        for raw in _observations(env):
            for reader in readers:
                largest[reader.name] = max(largest.get(reader.name, 0), int(np.max(reader.extract(raw))))
            if min(largest.values()) >= MOST_SYMBOLS:
                break
    return largest


def _observations(env: gymnasium.Env[Any, Any]) -> Iterator[Any]:
    """Observations of random actions in several episodes."""
    env.action_space.seed(SEED)
    over, length = True, 0
    for step in range(STEPS):
        if over or length == EPISODE_STEPS:
            raw, _ = env.reset(seed=SEED + step)
            over, length = False, 0
        else:
            raw, _, terminated, truncated, _ = env.step(env.action_space.sample())
            over, length = terminated or truncated, length + 1
        yield raw
