"""Self-contained HTML page: the scripts and the style of `page/`, with embedded data.

The content security policy of the page allows only scripts with a listed hash, so that markup in a name or a setting
cannot run, and forbids loading anything from other sites.
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

CHARTS = ("dom.js", "curves.js", "selection.js", "export.js", "charts.js", "maps.js", "panels.js")
"""Scripts that all pages begin with."""

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
<main id="page"><noscript>This page needs JavaScript, which is turned off.</noscript></main>
<script type="application/json" id="data">{data}</script>
{videos}<script>{script}</script>
</body>
</html>
"""


def render_page(
    title: str, scripts: Sequence[str], data: Any, videos: Sequence[str] = (), connect: str = "'none'"
) -> str:
    """Return the HTML of a page. `videos` are base64; `connect` is the source from which scripts may load data."""
    script = "\n".join(asset(name) for name in scripts)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (f"default-src 'none'; img-src data:; media-src 'self' blob:; style-src 'unsafe-inline'; "
              f"script-src 'sha256-{digest}'; connect-src {connect}; base-uri 'none'; form-action 'none'")
    embedded_videos = "".join(f'<script type="text/plain" id="reel-{index}">{video}</script>\n'
                              for index, video in enumerate(videos))
    return FRAME.format(policy=policy, title=html.escape(title), style=asset("page.css"), data=embedded(data),
                        videos=embedded_videos, script=script)


def asset(name: str) -> str:
    """Return the text of a file of `page/`."""
    return (files("qfleet.report") / "page" / name).read_text(encoding="utf-8")


def embedded(data: Any) -> str:
    """Return JSON that cannot close the surrounding element and contains neither NaN nor infinity."""
    return to_json(data).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def to_json(data: Any) -> str:
    return json.dumps(nan_to_null(data), separators=(",", ":"), default=str, allow_nan=False)


def nan_to_null(value: Any) -> Any:
    """Replace NaN and infinity, which JSON cannot express, by None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): nan_to_null(item) for key, item in value.items()}
    return [nan_to_null(item) for item in value] if isinstance(value, list | tuple) else value


def list_videos(folder: Path) -> list[Path]:
    """List videos, newest first. Links are skipped, also a linked folder: they could lead to any file."""
    found: dict[str, float] = {}
    with suppress(OSError), open_folder_no_follow(folder) as inside:
        for name in os.listdir(inside):
            with suppress(OSError):  # it has just been deleted
                status = os.stat(name, dir_fd=inside, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and name.endswith(".mp4") and not name.startswith("."):
                    found[name] = status.st_mtime
    return [folder / name for name in sorted(found, key=lambda name: (found[name], name), reverse=True)]


def read_video(path: Path) -> bytes:
    """Read a video that `list_videos` returned; OSError if it is gone or has been replaced by a link."""
    with open_folder_no_follow(path.parent) as inside, open_no_follow(path, inside) as file:
        return file.read()
