"""Images in observations: which spaces hold one, and how its frames are read.

    Box of bytes, 0..255           [H, W], [H, W, C] or [C, H, W]                       picture
    Box of booleans or integers    the same shapes, sides of 5 pixels or more; up to    board: uint8, counted from
      and MultiBinary              256 different values                                 the lowest value
    Box of floats                  [H, W, C] or [C, H, W], sides of 5 pixels or more    planes: float32

C is the axis that differs in length from two equal ones, else the shortest; of equally short ones the last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from gymnasium import spaces

from qfleet.core.env import Leaf
from qfleet.core.errors import UserError
from qfleet.envs.leaf_reader import LeafReader, SpaceMismatch

SMALLEST_SIDE = 5
"""Pixels of a board's or plane's shorter side: a smaller array is a vector."""

SYMBOL_SIDE = 32
"""Longest side, pixels, of an image whose few different values are taken for symbols."""

MOST_SYMBOLS = 32
"""Largest number of different values that are taken for symbols."""

BYTE = 255


@dataclass(frozen=True)
class ImageFormat:
    """Preprocessing of images: number of stacked frames and, if `size` is given, resizing of pictures to size x size.

    `symbols`: number of symbols per image leaf; `auto` = as the space says.
    """

    stack: int = 1
    size: int | None = None
    grey: bool = True
    symbols: Mapping[str, int] | Literal["auto"] | None = None


@dataclass(frozen=True)
class ImageLayout:
    """Layout of an image in the environment's array: kind, axes, lowest value and span of the values."""

    kind: Literal["picture", "board", "planes"]
    channels: int
    height: int
    width: int
    first: bool = False
    low: int = 0
    span: int = BYTE

    @property
    def may_hold_symbols(self) -> bool:
        return self.kind != "planes" and max(self.height, self.width) <= SYMBOL_SIDE


def image_layout(space: spaces.Space[Any]) -> ImageLayout | None:
    """Layout of the image that a space describes, or None if it describes none."""
    if isinstance(space, spaces.MultiBinary):
        return _board(space, 0, 1)
    if not isinstance(space, spaces.Box) or 0 in space.shape:
        return None
    if space.dtype == np.uint8 and (space.low == 0).all() and (space.high == BYTE).all() and len(space.shape) >= 2:
        if len(space.shape) > 3:
            raise UserError(f"an observation of shape {space.shape} is more than one image; leave out the wrapper that "
                            "stacks frames and set env.stack instead")
        return ImageLayout("picture", *_axes(space.shape))
    if space.dtype.kind == "f":
        axes = _axes(space.shape) if len(space.shape) == 3 else (1, 0, 0, False)
        return ImageLayout("planes", *axes) if min(axes[1:3]) >= SMALLEST_SIDE else None
    if space.dtype.kind not in "iub":
        return None
    return _board(space, int(space.low.min()), int(space.high.max()))


def _board(space: spaces.Box | spaces.MultiBinary, low: int, high: int) -> ImageLayout | None:
    axes = _axes(space.shape) if len(space.shape) in (2, 3) else (1, 0, 0, False)
    if min(axes[1:3]) < SMALLEST_SIDE or not 0 < high - low <= BYTE:
        return None
    return ImageLayout("board", *axes, low, high - low)


def _axes(shape: tuple[int, ...]) -> tuple[int, int, int, bool]:
    """Channels, height, width, and whether the channels come first."""
    if len(shape) == 2:
        return 1, shape[0], shape[1], False
    if channels_first(shape):
        return shape[0], shape[1], shape[2], True
    return shape[2], shape[0], shape[1], False


def channels_first(shape: tuple[int, ...]) -> bool:
    """True for [C, H, W]: the channels are the odd axis beside two equal ones, else the shortest, else the last."""
    if (shape[0] == shape[1]) != (shape[1] == shape[2]):
        return shape[1] == shape[2]
    return shape[0] < min(shape[1:])


def image_reader(name: str, path: tuple[Any, ...], space: spaces.Space[Any], layout: ImageLayout,
                 image_format: ImageFormat) -> LeafReader:
    """Reader of frames [C, H, W]."""
    assert space.shape is not None
    if layout.kind == "planes":
        assert isinstance(space, spaces.Box)
        leaf = Leaf((layout.channels, layout.height, layout.width), "float32", "image", largest=_largest(space))
        return LeafReader(name, path, leaf, _to_channels_first(layout, space.shape))
    if layout.kind == "board":
        symbols = _symbols(name, layout, image_format)
        return LeafReader(name, path, _byte_leaf(layout, symbols), _count_from_low(layout, space.shape),
                          *_symbol_bounds(symbols))
    return _picture(name, path, layout, space.shape, image_format)


def _largest(space: spaces.Box) -> float | None:
    """Value by which floats are divided: the largest magnitude of the space, if it is finite and above 1."""
    largest = float(max(np.abs(space.low).max(), np.abs(space.high).max()))
    return largest if np.isfinite(largest) and largest > 1 else None


def _symbols(name: str, layout: ImageLayout, image_format: ImageFormat) -> int:
    if image_format.symbols == "auto":
        known = layout.kind == "board" and layout.may_hold_symbols and 1 < layout.span < MOST_SYMBOLS
        return layout.span + 1 if known else 0
    return (image_format.symbols or {}).get(name, 0)


def _symbol_bounds(symbols: int) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Lowest and highest symbol; None for images without symbols."""
    return (np.zeros(()), np.array(symbols - 1)) if symbols else (None, None)


def _byte_leaf(layout: ImageLayout, symbols: int) -> Leaf:
    return Leaf((layout.channels, layout.height, layout.width), "uint8", "image", symbols=symbols,
                largest=None if layout.span == BYTE else float(layout.span))


def _to_channels_first(layout: ImageLayout, shape: tuple[int, ...]) -> Callable[[Any], np.ndarray]:
    def convert(value: Any) -> np.ndarray:
        image = np.asarray(value)
        if image.shape != shape or image.dtype.kind not in "fiub":
            raise SpaceMismatch(f"the space says {shape}, the environment gave {image.dtype} {image.shape}")
        return image if layout.first else image.transpose(2, 0, 1)

    return convert


def _count_from_low(layout: ImageLayout, shape: tuple[int, ...]) -> Callable[[Any], np.ndarray]:
    low, high = layout.low, layout.low + layout.span

    def convert(value: Any) -> np.ndarray:
        image = np.asarray(value)
        if image.shape != shape or image.dtype.kind not in "iub":
            raise SpaceMismatch(f"the space says integers {shape}, the environment gave {image.dtype} {image.shape}")
        if image.min() < low or image.max() > high:
            raise SpaceMismatch(f"the space says {low}..{high}, the environment gave {image.min()}..{image.max()}")
        if low:
            image = image.astype(np.int64) - low  # in a narrow dtype the difference may overflow
        if layout.first:
            return image
        return image[None] if image.ndim == 2 else image.transpose(2, 0, 1)

    return convert


def _picture(name: str, path: tuple[Any, ...], layout: ImageLayout, shape: tuple[int, ...],
             image_format: ImageFormat) -> LeafReader:
    size, to_grey = image_format.size, image_format.grey and layout.channels == 3
    symbols = _symbols(name, layout, image_format)
    if size and symbols:
        raise UserError(f"env.frame_size={size} resizes '{name}', which env.image_symbols says holds {symbols} "
                        "symbols: leave one of them out")
    resize = _make_resize(size, to_grey) if size else None
    if size:
        layout = ImageLayout("picture", 1 if to_grey else layout.channels, size, size, layout.first)

    def convert(value: Any) -> np.ndarray:
        image = np.asarray(value)
        if image.shape != shape or image.dtype != np.uint8:
            raise SpaceMismatch(f"the space says uint8 {shape}, the environment gave {image.dtype} {image.shape}")
        if resize is not None:
            image = resize(image.transpose(1, 2, 0) if layout.first else image)
        elif layout.first:
            return image
        return image[None] if image.ndim == 2 else image.transpose(2, 0, 1)

    return LeafReader(name, path, _byte_leaf(layout, symbols), convert, *_symbol_bounds(symbols),
                      resized=resize is not None)


def _make_resize(size: int, grey: bool) -> Callable[[np.ndarray], np.ndarray]:
    try:
        import cv2
    except ImportError:
        raise UserError(f"env.frame_size={size} resizes images with OpenCV, which is not installed; "
                        "pip install 'qfleet[atari]'") from None

    def resize(image: np.ndarray) -> np.ndarray:
        image = np.ascontiguousarray(image)
        if grey:
            image = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)
        small: np.ndarray = cv2.resize(image, (size, size), interpolation=cv2.INTER_AREA)
        return small

    return resize
