"""Draws the pictures of README and docs from the committed results.

Every picture bears the digest of what it was drawn from, so that one whose data has changed is found out without
comparing pixels, which differ between versions of matplotlib.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import continuous_returns
import curiosity_plots
import pong_family
import sources
import spread
import sweep

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"

Draw = Callable[[dict[str, Any]], Any]


PICTURES: dict[str, tuple[str, Draw]] = {
    "docs/assets/halfcheetah.png": ("continuous_returns.json", continuous_returns.draw),
    "docs/assets/deep_sea.png": ("deep_sea.json", curiosity_plots.draw),
    "docs/assets/agent57_deep_sea.png": ("agent57_deep_sea.json", curiosity_plots.draw),
    "docs/assets/pong_family.png": ("pong_family.json", pong_family.draw),
    "docs/assets/scaling-lanes.png": ("sweep_lanes.json", sweep.draw),
    "docs/assets/scaling-batch.png": ("sweep_batch.json", sweep.draw),
    "docs/assets/spread.png": ("spread.json", spread.draw),
    "docs/assets/sources_figures.png": ("sources_figures.json", sources.draw_figures),
    "docs/assets/sources_games.png": ("sources_games.json", sources.draw_games),
}
"""Every picture of README and docs, its data and who draws it; but for SCREENSHOTS."""

SCREENSHOTS = ("docs/assets/report.png", "docs/assets/watch.png")
"""Pages of real runs as Chromium shows them: no data is kept of them; tests/report/screenshots.py makes them anew."""


RECORDINGS = ("docs/assets/fleet.gif", "docs/assets/lunar-lander.gif", "docs/assets/pong.gif")
"""Videos of real runs, made by tests/report/gifs.py."""


def draw_all(check: bool) -> Iterator[str]:
    """Which pictures are older than their data; drawn anew unless only checked."""
    for name, (file, draw) in PICTURES.items():
        if not (RESULTS / file).exists():  # not measured yet; no page may show it
            continue
        path, text = ROOT / name, (RESULTS / file).read_bytes()
        digest = f"{file} {hashlib.sha256(text).hexdigest()[:16]}"
        if drawn_from(path) == digest:
            continue
        yield f"{name} is not drawn from {file} as it is"
        if not check:
            draw(json.loads(text)).savefig(path, dpi=110, metadata={"Source": digest})


def drawn_from(path: Path) -> str | None:
    """What a PNG says of its source: the text chunk of that name, which stands before the picture."""
    head = path.read_bytes()[:4096] if path.exists() else b""
    place = head.find(b"tEXtSource\0")
    if place < 0:
        return None
    size = int.from_bytes(head[place - 4:place], "big")
    return head[place + 11:place + 4 + size].decode("latin-1")
