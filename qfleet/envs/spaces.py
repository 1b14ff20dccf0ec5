"""Spaces into leaves: what an agent sees of an observation space, and how its action numbers are meant.

    Box uint8 [H, W], [H, W, C] or [C, H, W], 0..255  -> image    uint8   [C, H, W]
    any other real Box, MultiBinary                    -> vector   float32, the same shape
    Discrete, MultiDiscrete                            -> category int32   [k], counted from 0
    Dict, Tuple of these, nested                       -> one leaf each, named by its path: "a.b", "0"

Shapes: N lanes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from qfleet.core.env import Box, Leaf, Obs
from qfleet.core.errors import UserError

ROOT = "obs"
SUPPORTED_OBS = "Box (vectors and images), Discrete, MultiDiscrete, MultiBinary, and Dict or Tuple of these"
SUPPORTED_ACTIONS = "Discrete, MultiDiscrete up to env.max_action_combinations, and Box of floats with bounds"


class SpaceMismatch(Exception):
    """An observation that does not fit the space its environment announced."""


class OutOfSpace(SpaceMismatch):
    """An observation of the right shape whose value the space does not hold."""


@dataclass(frozen=True)
class ImageFormat:
    """How images are seen: frames on top of each other, and, if `size` is given, shrunk to size x size."""

    stack: int = 1
    size: int | None = None
    grey: bool = True


@dataclass(frozen=True)
class LeafReader:
    """One leaf: where it lies in the raw observation, and how it is brought into shape (one frame, no stack)."""

    name: str
    path: tuple[Any, ...]
    leaf: Leaf
    convert: Callable[[Any], np.ndarray | float]
    low: np.ndarray | None = None
    high: np.ndarray | None = None

    def extract(self, raw: Any) -> Any:
        for key in self.path:
            raw = raw[key]
        return raw


class ObservationEncoder:
    """Writes raw observations, lane by lane, into arrays [N, ...] by leaf; says which lanes are not finite."""

    def __init__(self, space: spaces.Space[Any], view: ImageFormat) -> None:
        self.readers = list(_readers(space, (), view))
        names = [port.name for port in self.readers]
        if not names or len(set(names)) < len(names):
            raise UserError(f"the observation {space} has {'two parts of one name' if names else 'no parts'}; "
                            f"supported: {SUPPORTED_OBS}")
        if view.stack > 1 and not any(port.leaf.kind == "image" for port in self.readers):
            raise UserError(f"env.stack={view.stack} stacks images, and the observation {space} has none; "
                            "leave env.stack out")
        self._vectors = [port.name for port in self.readers if port.leaf.kind == "vector"]
        self.leaves = {port.name: _stacked(port.leaf, view.stack) for port in self.readers}

    def allocate(self, lanes: int) -> Obs:
        """Room for one frame of every leaf in every lane."""
        return {port.name: np.empty((lanes, *port.leaf.shape), port.leaf.dtype) for port in self.readers}

    def write(self, out: Obs, lane: int, raw: Any) -> None:
        """Put a raw observation into its lane; raises Misfit when it does not belong to the space."""
        for port in self.readers:
            try:
                out[port.name][lane] = port.convert(port.extract(raw))
            except SpaceMismatch as misfit:
                raise type(misfit)(f"observation '{port.name}': {misfit}") from None
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise SpaceMismatch(f"observation '{port.name}' cannot be read: {error!r}") from None

    def all_finite(self, obs: Obs) -> bool:
        """Whether all numbers are finite."""
        # The sum of squares is finite only if all numbers are, and is found in less than half the time.
        return all(math.isfinite(np.vdot(obs[name], obs[name])) or bool(np.isfinite(obs[name]).all())
                   for name in self._vectors)

    def nonfinite_lanes(self, obs: Obs) -> np.ndarray:
        """Lanes [k] in which some number is NaN or infinite."""
        return np.flatnonzero(np.any([~np.isfinite(obs[name]).reshape(len(obs[name]), -1).all(1)
                                      for name in self._vectors], 0))

    def bounds_violation(self, obs: Obs) -> str | None:
        """Which leaf leaves the bounds of its Box, and how; None if all is well."""
        for port in self.readers:
            if port.low is not None and port.high is not None:
                values = obs[port.name]
                if (values < port.low).any() or (values > port.high).any():
                    return (f"observation '{port.name}' ranges over {values.min():g}..{values.max():g}, "
                            f"its space says {port.low.min():g}..{port.high.max():g}")
        return None


class FrameStack:
    """Keeps the newest frames of every lane: images [N, stack * C, H, W], newest last, zeros before the first."""

    def __init__(self, leaves: Mapping[str, Leaf], lanes: int) -> None:
        self.leaves = {name: leaf for name, leaf in leaves.items() if leaf.stack > 1}
        self._held = {name: np.zeros((lanes, *leaf.shape), leaf.dtype) for name, leaf in self.leaves.items()}

    def push(self, frames: Obs, fresh: np.ndarray) -> Obs:
        """Frames [N, C, H, W] in, stacks out; `fresh` [N] lanes begin an episode with theirs."""
        for name, leaf in self.leaves.items():
            channels = leaf.frame_shape[0]
            stacked = np.empty_like(self._held[name])
            stacked[:, :-channels] = self._held[name][:, channels:]
            stacked[fresh, :-channels] = 0
            stacked[:, -channels:] = frames[name]
            frames = {**frames, name: stacked}
            self._held[name] = stacked
        return frames


@dataclass(frozen=True)
class ActionDecoder:
    """The numbers 0..n-1, or with a `box` arrays within ±1, and what each means to the environment."""

    n: int
    decode: Callable[[Any], Any]
    box: Box | None = None

    def validate(self, actions: np.ndarray) -> list[Any]:
        """One action per lane, to be decoded; ValueError if one of them does not exist."""
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
    """Flat action numbers for a space; the last entry of a MultiDiscrete runs fastest. A Box is scaled from ±1."""
    if isinstance(space, spaces.Box) and space.dtype.kind == "f":
        return _scaled(space)
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


def _scaled(space: spaces.Box) -> ActionDecoder:
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise UserError(f"the action space {space} has no bounds, and actions are scaled to them: give it finite low "
                        "and high, or a wrapper whose action_space has some (env.wrappers)")
    half, middle = (high - low) / 2, (high + low) / 2

    def decode(action: np.ndarray) -> np.ndarray:
        # Clipped once more after rounding to the space's own numbers: a bound is not to be missed by a hair.
        return np.asarray(np.clip((middle + half * action).astype(space.dtype), space.low, space.high))

    return ActionDecoder(0, decode, Box(space.shape, tuple(low.ravel().tolist()), tuple(high.ravel().tolist())))


class SpaceAdapter:
    """Between one environment's own words and an agent's: raw observations to leaves, numbers to actions."""

    def __init__(
        self, observation: spaces.Space[Any], action: spaces.Space[Any], view: ImageFormat, limit: int
    ) -> None:
        self.encoder, self.actions = ObservationEncoder(observation, view), make_action_decoder(action, limit)
        self._plain = not isinstance(observation, spaces.Dict | spaces.Tuple)

    def encode(self, raw: Any) -> tuple[Obs, bool]:
        """Leaves [N, ...] of one raw observation, or of a batch if they are plain arrays; and whether it was one.

        Raises Misfit if it is neither, or if frames are stacked: one observation does not tell those before it.
        """
        if any(leaf.stack > 1 for leaf in self.encoder.leaves.values()):
            raise SpaceMismatch("images are stacked, so they are needed as the agent sees them")
        try:
            return self._written([raw]), True
        except OutOfSpace:
            raise
        except SpaceMismatch:
            if not self._plain or not isinstance(raw, np.ndarray | list | tuple) or len(raw) == 0:
                raise
        return self._written(raw), False

    def _written(self, raws: Any) -> Obs:
        out = self.encoder.allocate(len(raws))
        for lane, raw in enumerate(raws):
            self.encoder.write(out, lane, raw)
        return out


def channels_first(shape: tuple[int, ...]) -> bool:
    """Images have fewer channels than rows or columns, so the smallest axis names the layout."""
    return int(np.argmin(shape)) == 0


def _stacked(leaf: Leaf, stack: int) -> Leaf:
    if leaf.kind != "image" or stack == 1:
        return leaf
    return Leaf((leaf.shape[0] * stack, *leaf.shape[1:]), leaf.dtype, leaf.kind, stack=stack)


def _readers(space: spaces.Space[Any], path: tuple[Any, ...], view: ImageFormat) -> Iterator[LeafReader]:
    name = ".".join(str(key) for key in path) or ROOT
    if isinstance(space, spaces.Dict):
        for key, part in space.items():
            yield from _readers(part, (*path, key), view)
    elif isinstance(space, spaces.Tuple):
        for index, part in enumerate(space.spaces):
            yield from _readers(part, (*path, index), view)
    elif isinstance(space, spaces.Discrete):
        yield _category(name, path, np.array([space.n]), np.array([space.start]), ())
    elif isinstance(space, spaces.MultiDiscrete):
        yield _category(name, path, space.nvec.ravel(), space.start.ravel(), space.nvec.shape)
    elif isinstance(space, spaces.MultiBinary):
        yield _vector(name, path, space.shape)
    elif isinstance(space, spaces.Box) and space.dtype.kind in "fiub":
        yield _image(name, path, space, view) if _is_image(space) else _bounded(name, path, space)
    else:
        raise UserError(f"observation '{name}' has the space {space}, which is not supported; "
                        f"supported: {SUPPORTED_OBS}")


def _is_image(space: spaces.Box) -> bool:
    if space.dtype != np.uint8 or len(space.shape) < 2 or (space.low != 0).any() or (space.high != 255).any():
        return False
    if len(space.shape) > 3:
        raise UserError(f"an observation of shape {space.shape} is more than one image; leave out the wrapper that "
                        "stacks frames and set env.stack instead")
    return True


def _image(name: str, path: tuple[Any, ...], space: spaces.Box, view: ImageFormat) -> LeafReader:
    shape = space.shape
    first = len(shape) == 3 and channels_first(shape)
    height, width = shape[1:] if first else shape[:2]
    channels = 1 if len(shape) == 2 else shape[0] if first else shape[2]
    shrink = _shrinker(view.size, view.grey and channels == 3) if view.size else None
    if view.size:
        height, width, channels = view.size, view.size, 1 if view.grey and channels == 3 else channels

    def convert(value: Any) -> np.ndarray:
        picture = np.asarray(value)
        if picture.shape != shape or picture.dtype != np.uint8:
            raise SpaceMismatch(f"the space says uint8 {shape}, the environment gave {picture.dtype} {picture.shape}")
        if shrink is not None:
            picture = shrink(picture.transpose(1, 2, 0) if first else picture)
        elif first:
            return picture
        return picture[None] if picture.ndim == 2 else picture.transpose(2, 0, 1)

    return LeafReader(name, path, Leaf((channels, height, width), "uint8", "image"), convert)


def _shrinker(size: int, grey: bool) -> Callable[[np.ndarray], np.ndarray]:
    try:
        import cv2
    except ImportError:
        raise UserError(f"env.frame_size={size} resizes images with OpenCV, which is not installed; "
                        "pip install 'qfleet[atari]'") from None

    def shrink(picture: np.ndarray) -> np.ndarray:
        picture = np.ascontiguousarray(picture)
        if grey:
            picture = cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY)
        small: np.ndarray = cv2.resize(picture, (size, size), interpolation=cv2.INTER_AREA)
        return small

    return shrink


def _vector(name: str, path: tuple[Any, ...], shape: tuple[int, ...]) -> LeafReader:
    def convert(value: Any) -> np.ndarray:
        array = value if type(value) is np.ndarray else np.asarray(value)
        if array.shape != shape or array.dtype.kind not in "fiub":
            raise SpaceMismatch(f"the space says {shape}, the environment gave {array.dtype} {array.shape}")
        return array

    return LeafReader(name, path, Leaf(shape or (1,), "float32", "vector"), convert)


def _bounded(name: str, path: tuple[Any, ...], space: spaces.Box) -> LeafReader:
    port = _vector(name, path, space.shape)
    low, high = (np.reshape(bound, port.leaf.shape).astype(np.float32) for bound in (space.low, space.high))
    if np.isneginf(low).all() and np.isposinf(high).all():
        return port
    return LeafReader(name, path, port.leaf, port.convert, low, high)


def _category(
    name: str, path: tuple[Any, ...], sizes: np.ndarray, start: np.ndarray, shape: tuple[int, ...]
) -> LeafReader:
    def convert(value: Any) -> np.ndarray:
        array = np.asarray(value)
        if array.shape != shape or array.dtype.kind not in "iub":
            raise SpaceMismatch(f"the space says integers {shape}, the environment gave {array.dtype} {array.shape}")
        index = array.reshape(-1).astype(np.int64) - start
        if (index < 0).any() or (index >= sizes).any():
            raise OutOfSpace(f"{array} lies outside the space, which counts from {start} through {start + sizes - 1}")
        return index

    return LeafReader(name, path, Leaf((len(sizes),), "int32", "category", tuple(int(n) for n in sizes)), convert)
