"""A page of one file: the scripts and the style of `page/`, and data that stays data.

The scripts that may run are named by their hashes in the page's own content policy, so markup that slipped into a
name or a setting could not run anything; and nothing may be loaded from anywhere.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

from qfleet.runs.safe_open import open_folder_no_follow, open_no_follow

FRAME = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="qfleet">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<main id="page"><noscript>This page draws itself with JavaScript, which is turned off.</noscript></main>
<script type="application/json" id="data">{data}</script>
{reels}<script>{script}</script>
</body>
</html>
"""


def render_page(
    title: str, scripts: Sequence[str], data: Any, reels: Sequence[str] = (), connect: str = "'none'"
) -> str:
    """The text of a page; `reels` are films as base64, `connect` is where its scripts may ask for more."""
    script = "\n".join(asset(name) for name in scripts)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (f"default-src 'none'; img-src data:; media-src 'self' blob:; style-src 'unsafe-inline'; "
              f"script-src 'sha256-{digest}'; connect-src {connect}; base-uri 'none'; form-action 'none'")
    films = "".join(f'<script type="text/plain" id="reel-{index}">{reel}</script>\n'
                    for index, reel in enumerate(reels))
    return FRAME.format(policy=policy, title=html.escape(title), style=asset("page.css"), data=embedded(data),
                        reels=films, script=script)


def asset(name: str) -> str:
    """A file of `page/`."""
    return (files("qfleet.report") / "page" / name).read_text(encoding="utf-8")


def embedded(data: Any) -> str:
    """JSON that cannot end the element that it stands in, and knows neither NaN nor infinity."""
    return to_json(data).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def to_json(data: Any) -> str:
    return json.dumps(nan_to_null(data), separators=(",", ":"), default=str, allow_nan=False)


def nan_to_null(value: Any) -> Any:
    """JSON has no word for NaN and infinity: null stands for them."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): nan_to_null(item) for key, item in value.items()}
    return [nan_to_null(item) for item in value] if isinstance(value, list | tuple) else value


def list_videos(folder: Path) -> list[Path]:
    """The newest first. Links are left out, also where the folder itself is one: they could lead to any file."""
    found: dict[str, float] = {}
    with suppress(OSError), open_folder_no_follow(folder) as inside:
        for name in os.listdir(inside):
            with suppress(OSError):  # it has just been deleted
                status = os.stat(name, dir_fd=inside, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and name.endswith(".mp4") and not name.startswith("."):
                    found[name] = status.st_mtime
    return [folder / name for name in sorted(found, key=lambda name: (found[name], name), reverse=True)]


def read_video(path: Path) -> bytes:
    """A film by a path that `films_of` returned; OSError if it is gone, or a link has taken its place."""
    with open_folder_no_follow(path.parent) as inside, open_no_follow(path, inside) as file:
        return file.read()
