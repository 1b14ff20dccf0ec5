"""Checks for optional dependencies."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

from qfleet.core.errors import UserError


def require_encoder() -> None:
    """Raise UserError if the video encoder is not installed."""
    if find_spec("imageio_ffmpeg") is None:
        raise UserError("eval.video_period records videos of evaluations, which needs imageio-ffmpeg: "
                        "pip install 'qfleet[video]', or set eval.video_period=0")


def require_module(name: str, extra: str, purpose: str) -> Any:
    """Import a package of an extra; UserError that names the extra if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"{purpose} need {error.name or name}, which is not installed: "
                        f"pip install 'qfleet[{extra}]'") from None
