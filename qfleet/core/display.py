"""Whether there is a screen to open a window on."""

from __future__ import annotations

import os
import sys


def display_name() -> str | None:
    """The name of the screen, or None."""
    if sys.platform in ("darwin", "win32"):
        return sys.platform
    return os.environ.get("WAYLAND_DISPLAY") or os.environ.get("DISPLAY") or None
