"""Videos of an agent: a stream of frames to an MP4, a GIF or a window; only a GIF holds all frames in memory.

A frame is `[H, W, 3]` (or grey, `[H, W]`) uint8. Small frames are enlarged by an integer factor so that a 10x5 board
is visible, and sides are padded to even lengths because common H.264 stores colour for 2x2 blocks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import HumanRendering

from qfleet.core.display import display_name
from qfleet.core.errors import UserError
from qfleet.runs.atomic_file import atomic_file

SMALLEST_SIDE = 320
LARGEST_SIDE = 1280
ProgressCallback = Callable[[int], None]
"""Called with the number of frames written so far."""


def enlargement(height: int, width: int) -> int:
    """Return the integer factor that brings the short side to 320 pixels, unless the long side would exceed 1280."""
    wanted = -(-SMALLEST_SIDE // min(height, width))
    return max(1, min(wanted, LARGEST_SIDE // max(height, width)))


def prepare_frame(frame: np.ndarray) -> np.ndarray:
    """Convert a frame for the encoder: `[H, W, 3]` uint8, contiguous, enlarged, even sides.

    Floats within 0 to 1, which some environments render, are converted to bytes.
    """
    if frame.dtype.kind == "f" and frame.size and frame.min() >= 0 and frame.max() <= 1:
        frame = (frame * 255).round().astype(np.uint8)
    if frame.ndim == 2:
        frame = np.repeat(frame[:, :, None], 3, axis=2)
    if frame.ndim != 3 or frame.shape[2] != 3 or frame.dtype != np.uint8 or 0 in frame.shape:
        raise UserError(f"a frame must be uint8 with shape [height, width, 3], not {frame.dtype} "
                        f"{list(frame.shape)}: check what the environment's render() returns")
    factor = enlargement(*frame.shape[:2])
    large = frame.repeat(factor, axis=0).repeat(factor, axis=1)
    odd_rows, odd_columns = large.shape[0] % 2, large.shape[1] % 2
    return np.ascontiguousarray(np.pad(large, ((0, odd_rows), (0, odd_columns), (0, 0)), mode="edge"))


def without_display() -> None:
    """Without a display, use SDL's dummy driver: many environments render with SDL, which would fail."""
    if display_name() is None:
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")


class EncodingFailed(UserError):
    """The encoder exited or could not write: the disk is full, or its process was killed."""


def write_mp4(
    frames: Iterable[np.ndarray], path: str | Path, fps: float = 30, progress: ProgressCallback | None = None
) -> int:
    """Encode as H.264 and return the number of frames; the file gets its name only when it is complete."""
    try:
        import imageio_ffmpeg
    except ImportError:
        raise UserError("writing MP4 needs imageio-ffmpeg: pip install 'qfleet[video]'") from None
    target = _target(path, ".mp4", fps)
    first, prepared = _prepared(frames)
    height, width = first.shape[:2]
    with atomic_file(target) as partial:
        return _encode(imageio_ffmpeg.write_frames(str(partial), (width, height), fps=fps, quality=7,
                                                   macro_block_size=2, ffmpeg_log_level="error"),
                       prepared, target, progress)


def _encode(encoder: Any, frames: Iterable[np.ndarray], target: Path, progress: ProgressCallback | None) -> int:
    count = 0
    try:
        encoder.send(None)
        for frame in frames:
            encoder.send(frame)
            count += 1
            if progress is not None:
                progress(count)
        encoder.close()
    except OSError as error:
        raise EncodingFailed(f"cannot write {target}: {_last_line(error)}; is the disk full?") from error
    finally:
        encoder.close()
    return count


def write_gif(
    frames: Iterable[np.ndarray], path: str | Path, fps: float = 30, progress: ProgressCallback | None = None
) -> int:
    """Write a GIF that loops forever and return the number of frames.

    The format counts in hundredths of a second and viewers reject less than two: at most 50 frames per second.
    """
    try:
        from PIL import Image
    except ImportError:
        raise UserError("writing GIF needs pillow: pip install 'qfleet[video]'") from None
    target = _target(path, ".gif", fps)
    _, prepared = _prepared(frames)
    palettes: list[Any] = []
    for count, frame in enumerate(prepared, start=1):
        # Reduced to 256 colours immediately, which takes a third of the memory.
        palettes.append(Image.fromarray(frame).quantize(colors=256, method=Image.Quantize.FASTOCTREE))
        if progress is not None:
            progress(count)
    with atomic_file(target) as partial:
        palettes[0].save(partial, save_all=True, append_images=palettes[1:], loop=0,
                         duration=max(20, round(100 / fps) * 10), optimize=False)
    return len(palettes)


def show(frames: Iterable[np.ndarray], title: str, fps: float = 30) -> int:
    """Show frames in Gymnasium's window until they end or it is closed (also by Esc or Q); returns their number."""
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")  # pygame would print to stdout
    try:
        import pygame
    except ImportError:
        raise UserError("a window needs pygame: pip install 'qfleet[video]'") from None
    if display_name() is None and not os.environ.get("SDL_VIDEODRIVER"):  # SDL would show nothing, without an error
        raise UserError("there is no display to open a window on: record a video instead with `qfleet record`, "
                        "or connect with a display (ssh -X)")
    _, prepared = _prepared(frames)
    source, shown = _FrameSource(fps), 0
    pygame.display.set_caption(title)
    with closing(HumanRendering(source)) as window:
        for frame in prepared:
            source.show(frame)
            try:
                window.step(None)
            except pygame.error as error:
                raise UserError(f"cannot open a window ({error}): record a video instead with "
                                "`qfleet record`") from None
            shown += 1
            if any(_closes(pygame, event) for event in pygame.event.get()):
                break
    return shown


def _closes(pygame: Any, event: Any) -> bool:
    return event.type == pygame.QUIT or (event.type == pygame.KEYDOWN and event.key in (pygame.K_ESCAPE, pygame.K_q))


class _FrameSource(gymnasium.Env[None, None]):
    """Environment that renders a given frame, for `HumanRendering`, which has no vector version.

    Wrapping the agent's environment instead would count errors of the window as faults of the environment.
    """

    render_mode = "rgb_array"

    def __init__(self, fps: float) -> None:
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": fps}

    def step(self, action: None) -> tuple[None, float, bool, bool, dict[str, Any]]:
        return None, 0.0, False, False, {}

    def show(self, frame: np.ndarray) -> None:
        """Set the image that `render` returns."""
        self._frame = frame

    def render(self) -> Any:
        return self._frame


def _target(path: str | Path, suffix: str, fps: float) -> Path:
    target = Path(path)
    if not 0 < fps <= 240:
        raise UserError(f"{fps:g} frames per second is not possible: choose --fps between 1 and 240")
    if target.suffix.lower() != suffix:
        raise UserError(f"{target} does not end in {suffix}: use a file name with that suffix")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot create the folder {target.parent}: {error.strerror}") from None
    if not os.access(target.parent, os.W_OK):
        raise UserError(f"cannot write to {target.parent}: choose another path with --out")
    return target


def _prepared(frames: Iterable[np.ndarray]) -> tuple[np.ndarray, Iterator[np.ndarray]]:
    """Return the first prepared frame, for its size, and the stream of all; UserError for a frame of another size."""
    source = iter(frames)
    raw = next(source, None)
    if raw is None:
        raise UserError("there are no frames: the environment rendered nothing (does it support rgb_array?)")
    first = prepare_frame(raw)

    def stream() -> Iterator[np.ndarray]:
        yield first
        for number, frame in enumerate(source, start=2):
            prepared = prepare_frame(frame)
            if prepared.shape != first.shape:
                raise UserError(f"frame {number} has size {frame.shape[1]}x{frame.shape[0]}, the first had "
                                f"{raw.shape[1]}x{raw.shape[0]}: the environment must render at one size")
            yield prepared

    return first, stream()


def _last_line(error: OSError) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
