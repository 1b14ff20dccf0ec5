"""Conversion of Gymnasium spaces: observations to leaves, action indices to actions.

    Box and MultiBinary that are images (images.py)    -> image    uint8 or float32 [C, H, W]
    any other real Box, MultiBinary                    -> vector   float32, the same shape
    Discrete, MultiDiscrete                            -> category int32   [k], counted from 0
    Dict, Tuple of these, nested                       -> one leaf each, named by its path: "a.b", "0"
    text in a Dict or Tuple                            -> left out

Shapes: N lanes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from gymnasium import spaces

from qfleet.core.env import Box, Leaf, Obs
from qfleet.core.errors import UserError
from qfleet.envs.images import ImageFormat, image_layout, image_reader
from qfleet.envs.leaf_reader import LeafReader, OutOfSpace, SpaceMismatch

ROOT = "obs"
SUPPORTED_OBS = "Box (vectors and images), Discrete, MultiDiscrete, MultiBinary, and Dict or Tuple of these"
SUPPORTED_ACTIONS = "Discrete, MultiDiscrete up to env.max_action_combinations, and Box of floats with bounds"


class ObservationEncoder:
    """Writes raw observations, lane by lane, into arrays [N, ...] per leaf; detects non-finite values.

    `texts` are the paths of the texts that are left out.
    """

    def __init__(self, space: spaces.Space[Any], image_format: ImageFormat) -> None:
        self.readers = list(_readers(space, (), image_format))
        self.texts = list(_texts(space, ()))
        names = [reader.name for reader in self.readers]
        if not names or len(set(names)) < len(names):
            raise UserError(f"the observation {space} has {'two leaves with the same name' if names else 'no leaves'}; "
                            f"supported: {SUPPORTED_OBS}")
        images = [reader.name for reader in self.readers if reader.leaf.kind == "image"]
        if image_format.stack > 1 and not images:
            raise UserError(f"env.stack={image_format.stack} stacks images, and the observation {space} has none; "
                            "leave env.stack out")
        named = () if image_format.symbols == "auto" else image_format.symbols or ()
        whole = [reader.name for reader in self.readers if reader.leaf.kind == "image" and reader.leaf.dtype == "uint8"]
        if unknown := sorted(set(named) - set(whole)):
            raise UserError(f"env.image_symbols names {', '.join(unknown)}, and the observation's images of whole "
                            f"numbers are {', '.join(whole) or 'none'}")
        self._floats = [reader.name for reader in self.readers if reader.leaf.dtype == "float32"]
        self.leaves = {reader.name: _stacked(reader.leaf, image_format.stack) for reader in self.readers}

    def allocate(self, lanes: int) -> Obs:
        """Uninitialised arrays for one frame of every leaf in every lane."""
        return {reader.name: np.empty((lanes, *reader.leaf.shape), reader.leaf.dtype) for reader in self.readers}

    def write(self, out: Obs, lane: int, raw: Any) -> None:
        """Write a raw observation into its lane; raises SpaceMismatch if it does not belong to the space."""
        for reader in self.readers:
            try:
                out[reader.name][lane] = reader.convert(reader.extract(raw))
            except SpaceMismatch as mismatch:
                raise type(mismatch)(f"observation '{reader.name}': {mismatch}") from None
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise SpaceMismatch(f"observation '{reader.name}' cannot be read: {error!r}") from None

    def all_finite(self, obs: Obs) -> bool:
        """True if all floats are finite."""
        # The sum of squares is finite only if all floats are, and takes less than half the time.
        return all(math.isfinite(np.vdot(obs[name], obs[name])) or bool(np.isfinite(obs[name]).all())
                   for name in self._floats)

    def nonfinite_lanes(self, obs: Obs) -> np.ndarray:
        """Lanes [k] with a NaN or an infinity."""
        return np.flatnonzero(np.any([~np.isfinite(obs[name]).reshape(len(obs[name]), -1).all(1)
                                      for name in self._floats], 0))

    def bounds_violation(self, obs: Obs) -> str | None:
        """Description of the first leaf outside the bounds of its Box, or None."""
        for reader in self.readers:
            if reader.low is not None and reader.high is not None:
                values = obs[reader.name]
                if (values < reader.low).any() or (values > reader.high).any():
                    if reader.leaf.symbols:
                        return (f"the image '{reader.name}' has the value {values.max()}, and values from "
                                f"{reader.leaf.symbols} on count as {reader.leaf.symbols - 1}: set "
                                "env.image_symbols to the number of its values, or to null if it is a picture")
                    return (f"observation '{reader.name}' ranges over {values.min():g}..{values.max():g}, "
                            f"its space says {reader.low.min():g}..{reader.high.max():g}")
        return None


class FrameStack:
    """Stack of the newest frames per lane: images [N, stack * C, H, W], newest last, zeros before the first."""

    def __init__(self, leaves: Mapping[str, Leaf], lanes: int) -> None:
        self.leaves = {name: leaf for name, leaf in leaves.items() if leaf.stack > 1}
        self._frames = {name: np.zeros((lanes, *leaf.shape), leaf.dtype) for name, leaf in self.leaves.items()}

    def push(self, frames: Obs, fresh: np.ndarray) -> Obs:
        """Frames [N, C, H, W] -> stacks; in `fresh` [N] lanes the frame starts an episode."""
        for name, leaf in self.leaves.items():
            channels = leaf.frame_shape[0]
            stacked = np.empty_like(self._frames[name])
            stacked[:, :-channels] = self._frames[name][:, channels:]
            stacked[fresh, :-channels] = 0
            stacked[:, -channels:] = frames[name]
            frames = {**frames, name: stacked}
            self._frames[name] = stacked
        return frames


@dataclass(frozen=True)
class ActionDecoder:
    """Agent actions (0..n-1, or with a `box` arrays within ±1) and their decoding to environment actions."""

    n: int
    decode: Callable[[Any], Any]
    box: Box | None = None

    def validate(self, actions: np.ndarray) -> list[Any]:
        """One action per lane, ready to decode; raises ValueError for an invalid action."""
        if self.box is not None:
            if actions.shape[1:] != self.box.shape or not (np.abs(actions) <= 1).all():
                raise ValueError(f"actions of shape {self.box.shape} within ±1, not {actions}")
            return list(actions)
        sent: list[Any] = actions.tolist()
        for action in sent:
            if not 0 <= action < self.n:
                raise ValueError(f"actions 0..{self.n - 1}, not {action}")
        return sent


def make_action_decoder(space: spaces.Space[Any], limit: int) -> ActionDecoder:
    """Decoder of flat action indices; the last entry of a MultiDiscrete varies fastest. A Box is rescaled from ±1."""
    if isinstance(space, spaces.Box) and space.dtype.kind == "f":
        return _rescaled(space)
    if isinstance(space, spaces.Discrete):
        start = int(space.start)
        return ActionDecoder(int(space.n), start.__add__)
    if isinstance(space, spaces.MultiDiscrete):
        n = math.prod(int(size) for size in space.nvec.flat)
        if n > limit:
            raise UserError(f"the action space {space} has {n} combinations, the limit is "
                            f"env.max_action_combinations={limit}; raise it, or wrap the environment")
        start_values, shape, dtype = space.start.ravel(), space.nvec.shape, space.dtype
        table = [(np.array(choice, dtype) + start_values).astype(dtype).reshape(shape)
                 for choice in itertools.product(*(range(int(size)) for size in space.nvec.flat))]
        return ActionDecoder(n, lambda action: table[action].copy())
    raise UserError(f"the action space {space} is not supported by this agent; supported: {SUPPORTED_ACTIONS}")


def _rescaled(space: spaces.Box) -> ActionDecoder:
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise UserError(f"the action space {space} has no bounds, and actions are scaled to them: give it finite low "
                        "and high, or a wrapper whose action_space has some (env.wrappers)")
    half, middle = (high - low) / 2, (high + low) / 2

    def decode(action: np.ndarray) -> np.ndarray:
        # Clipped after the cast to the space's dtype, since rounding may exceed a bound.
        return np.asarray(np.clip((middle + half * action).astype(space.dtype), space.low, space.high))

    return ActionDecoder(0, decode, Box(space.shape, tuple(low.ravel().tolist()), tuple(high.ravel().tolist())))


class SpaceAdapter:
    """Converts raw observations of one environment to leaves, and agent actions to environment actions."""

    def __init__(
        self, observation: spaces.Space[Any], action: spaces.Space[Any], image_format: ImageFormat, limit: int
    ) -> None:
        self.observation, self.action = observation, action
        self.encoder, self.actions = ObservationEncoder(observation, image_format), make_action_decoder(action, limit)
        self._array_space = not isinstance(observation, spaces.Dict | spaces.Tuple)

    def encode(self, raw: Any) -> tuple[Obs, bool]:
        """Leaves [N, ...] of one raw observation or of a batch of plain arrays; the flag is True for a single one.

        Raises SpaceMismatch if it is neither, or if frames are stacked: one observation does not contain the previous
        ones.
        """
        if any(leaf.stack > 1 for leaf in self.encoder.leaves.values()):
            raise SpaceMismatch("frames are stacked: pass the stacked images that the agent sees")
        try:
            return self._encode_all([raw]), True
        except OutOfSpace:
            raise
        except SpaceMismatch:
            if not self._array_space or not isinstance(raw, np.ndarray | list | tuple) or len(raw) == 0:
                raise
        return self._encode_all(raw), False

    def _encode_all(self, raws: Any) -> Obs:
        out = self.encoder.allocate(len(raws))
        for lane, raw in enumerate(raws):
            self.encoder.write(out, lane, raw)
        return out


def _stacked(leaf: Leaf, stack: int) -> Leaf:
    if leaf.kind != "image" or stack == 1:
        return leaf
    return replace(leaf, shape=(leaf.shape[0] * stack, *leaf.shape[1:]), stack=stack)


def _readers(space: spaces.Space[Any], path: tuple[Any, ...], image_format: ImageFormat) -> Iterator[LeafReader]:
    name = ".".join(str(key) for key in path) or ROOT
    if isinstance(space, spaces.Dict):
        for key, part in space.items():
            yield from _readers(part, (*path, key), image_format)
    elif isinstance(space, spaces.Tuple):
        for index, part in enumerate(space.spaces):
            yield from _readers(part, (*path, index), image_format)
    elif isinstance(space, spaces.Discrete):
        yield _category(name, path, np.array([space.n]), np.array([space.start]), ())
    elif isinstance(space, spaces.MultiDiscrete):
        yield _category(name, path, space.nvec.ravel(), space.start.ravel(), space.nvec.shape)
    elif (layout := image_layout(space)) is not None:
        yield image_reader(name, path, space, layout, image_format)
    elif isinstance(space, spaces.MultiBinary):
        yield _vector(name, path, space.shape)
    elif isinstance(space, spaces.Box) and space.dtype.kind in "fiub":
        yield _bounded(name, path, space)
    elif not path or not is_text(space):
        raise UserError(f"observation '{name}' has the space {space}, which is not supported; "
                        f"supported: {SUPPORTED_OBS}")


def is_text(space: spaces.Space[Any]) -> bool:
    """True for Text and for spaces of strings that a package defines."""
    return isinstance(space, spaces.Text) or (space.dtype is not None and space.dtype.kind == "U")


def _texts(space: spaces.Space[Any], path: tuple[Any, ...]) -> Iterator[str]:
    """Paths of the texts within a Dict or Tuple."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        for key, part in space.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces):
            yield from _texts(part, (*path, key))
    elif path and is_text(space):
        yield ".".join(map(str, path))


def _vector(name: str, path: tuple[Any, ...], shape: tuple[int, ...]) -> LeafReader:
    def convert(value: Any) -> np.ndarray:
        array = value if type(value) is np.ndarray else np.asarray(value)
        if array.shape != shape or array.dtype.kind not in "fiub":
            raise SpaceMismatch(f"the space says {shape}, the environment gave {array.dtype} {array.shape}")
        return array

    return LeafReader(name, path, Leaf(shape or (1,), "float32", "vector"), convert)


def _bounded(name: str, path: tuple[Any, ...], space: spaces.Box) -> LeafReader:
    reader = _vector(name, path, space.shape)
    low, high = (np.reshape(bound, reader.leaf.shape).astype(np.float32) for bound in (space.low, space.high))
    if np.isneginf(low).all() and np.isposinf(high).all():
        return reader
    return LeafReader(name, path, reader.leaf, reader.convert, low, high)


def _category(
    name: str, path: tuple[Any, ...], sizes: np.ndarray, start: np.ndarray, shape: tuple[int, ...]
) -> LeafReader:
    def convert(value: Any) -> np.ndarray:
        array = np.asarray(value)
        if array.shape != shape or array.dtype.kind not in "iub":
            raise SpaceMismatch(f"the space says integers {shape}, the environment gave {array.dtype} {array.shape}")
        index = array.reshape(-1).astype(np.int64) - start
        if (index < 0).any() or (index >= sizes).any():
            raise OutOfSpace(f"{array} lies outside the space, which counts from {start} to {start + sizes - 1}")
        return index

    return LeafReader(name, path, Leaf((len(sizes),), "int32", "category", tuple(int(n) for n in sizes)), convert)
