"""Checks for optional dependencies."""

from __future__ import annotations

from importlib.util import find_spec

from qfleet.core.errors import UserError


def require_encoder() -> None:
    """Raise UserError if the video encoder is not installed."""
    if find_spec("imageio_ffmpeg") is None:
        raise UserError("eval.video_period records videos of evaluations, which needs imageio-ffmpeg: "
                        "pip install 'qfleet[video]', or set eval.video_period=0")
