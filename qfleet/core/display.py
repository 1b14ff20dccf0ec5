"""Detection of a graphical display."""

from __future__ import annotations

import os
import sys


def display_name() -> str | None:
    """Name of the display, or None if there is none."""
    if sys.platform in ("darwin", "win32"):
        return sys.platform
    return os.environ.get("WAYLAND_DISPLAY") or os.environ.get("DISPLAY") or None
