"""Who takes part in a run, for whoever looks on: a small file in the run directory, written anew every second."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

FILE = "fleet.json"
SILENT_S = 5.0
"""Members are heard of every second, on a machine that is not too busy."""

RATE_S = 10.0


def write_roll(folder: Path, members: Sequence[Mapping[str, Any]]) -> None:
    """Replace the file at once, but without waiting for the disk: nobody depends on it."""
    beside = folder / f".{FILE}.tmp"
    try:
        beside.write_text(json.dumps({"at": time.time(), "members": list(members)}))
        beside.replace(folder / FILE)
    except OSError as error:
        log.debug("the roll could not be written (%s)", error)


def read_roll(folder: Path) -> dict[str, Any]:
    """What the file says; nothing if there is none, or not one of ours."""
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads((folder / FILE).read_text())
        members = found.get("members") if isinstance(found, dict) else None
        if isinstance(members, list) and isinstance(found.get("at"), int | float):
            return {"at": found["at"], "members": [each for each in members if isinstance(each, dict)]}
    return {}


class Roll:
    """Who is there, how fast and how well, from one look to the next; and what has happened meanwhile."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._steps: dict[tuple[str, int], deque[tuple[float, float]]] = {}
        self._health: dict[str, tuple[int, str]] = {}
        self.events: deque[tuple[float, str]] = deque(maxlen=50)

    def look(self, now: float) -> list[dict[str, Any]]:
        """A row for each member, with `rate` in steps per second and `health`: well, silent or lost."""
        found = read_roll(self._folder)
        if not found:
            return []
        since = max(0.0, now - float(found["at"]))  # nobody writes any more if the learner is gone
        return [self._row(member, since, now) for member in found["members"]]

    def _row(self, member: Mapping[str, Any], since: float, now: float) -> dict[str, Any]:
        name, life = str(member.get("name")), int(member.get("incarnation") or 1)
        silent, limit = float(member.get("silent_s") or 0) + since, float(member.get("live_s") or 30)
        health = "lost" if silent > limit else "silent" if silent > SILENT_S else "well"
        self._note(name, life, health, silent, now)
        rate = self._rate(name, life, float(member.get("steps") or 0), now - silent)
        return {**member, "name": name, "silent_s": silent, "health": health,
                "rate": rate if health == "well" else None}

    def _rate(self, name: str, life: int, steps: float, said: float) -> float | None:
        marks = self._steps.setdefault((name, life), deque())
        if not marks or steps != marks[-1][1]:
            marks.append((said, steps))
        while len(marks) > 2 and marks[-1][0] - marks[0][0] > RATE_S:
            marks.popleft()
        (t0, s0), (t1, s1) = marks[0], marks[-1]
        return (s1 - s0) / (t1 - t0) if t1 > t0 else None

    def _note(self, name: str, life: int, health: str, silent: float, now: float) -> None:
        before = self._health.get(name)
        self._health[name] = life, health
        if before is None:
            return
        if life > before[0]:
            self.events.append((now, f"{name} came back as another process: life {life}"))
        elif health != before[1]:
            text = "is heard of again" if health == "well" else f"has not been heard of for {silent:.0f} s"
            self.events.append((now, f"{name} {text}"))
