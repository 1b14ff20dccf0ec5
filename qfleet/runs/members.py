"""Who takes part in a run, for whoever looks on: small files in the run directory.

The learner writes every second who is there, the head of the fleet who has just died and how: only a parent knows.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from qfleet.runs.safe_open import open_no_follow

log = logging.getLogger(__name__)

MEMBERS_FILE, EXITS_FILE = "fleet.json", "exits.json"
MOST_EXITS = 50
SILENT_S = 5.0
"""Members are heard of every second, on a machine that is not too busy."""

RATE_S = 10.0
RECENT_S = 60.0
LATE_S = 1.0
"""The last words of the dead may be heard a moment later."""


def write_members(folder: Path, members: Sequence[Mapping[str, Any]]) -> None:
    """Say who is there now."""
    _write(folder / MEMBERS_FILE, members)


def read_members(folder: Path) -> dict[str, Any]:
    """What the file says; nothing if there is none, or not one of ours."""
    return _read(folder / MEMBERS_FILE)


def record_exit(folder: Path, name: str, pid: int, how: str) -> None:
    """Say that a member died, and how: `was killed by SIGKILL: perhaps out of memory`."""
    known = _read(folder / EXITS_FILE).get("members", [])
    _write(folder / EXITS_FILE, [*known, {"at": time.time(), "name": name, "pid": pid, "how": how}][-MOST_EXITS:])


def _write(path: Path, members: Sequence[Mapping[str, Any]]) -> None:
    """Replace the file at once, but without waiting for the disk: nobody depends on it."""
    beside = path.with_name(f".{path.name}.tmp")
    try:
        beside.write_text(json.dumps({"at": time.time(), "members": list(members)}))
        beside.replace(path)
    except OSError as error:
        log.debug("the roll could not be written (%s)", error)


def _read(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError, RecursionError):
        with open_no_follow(path) as file:
            found = json.load(file)
        members = found.get("members") if isinstance(found, dict) else None
        if isinstance(members, list) and isinstance(found.get("at"), int | float):
            return {"at": found["at"], "members": [each for each in members if isinstance(each, dict)]}
    return {}


def short_exit_text(how: str) -> str:
    """How somebody died, in the few words that a table has room for: `killed (SIGKILL)`."""
    return re.sub(r"^was killed by (\w+).*", r"killed (\1)", how, flags=re.S)


class MemberMonitor:
    """Who is there, how fast and how well, from one look to the next; and what has happened meanwhile."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._steps: dict[tuple[str, int], deque[tuple[float, float]]] = {}
        self._health: dict[str, tuple[int, str]] = {}
        self._exits: dict[tuple[str, int], tuple[float, str]] = {}  # when and how, by name and process
        self.events: deque[tuple[float, str]] = deque(maxlen=50)

    def poll(self, now: float) -> list[dict[str, Any]]:
        """A row for each member, with `rate` in steps per second and `health`: healthy, silent, down or lost.

        Who is down is known to have died, and is being started again: `words` say how it died.
        """
        found = read_members(self._folder)
        self._hear_of_exits(now)
        if not found:
            return []
        since = max(0.0, now - float(found["at"]))  # nobody writes any more if the learner is gone
        return [self._row(member, since, now) for member in found["members"]]

    def _row(self, member: Mapping[str, Any], since: float, now: float) -> dict[str, Any]:
        name, life = str(member.get("name")), int(member.get("incarnation") or 1)
        silent, limit = float(member.get("silent_s") or 0) + since, float(member.get("live_s") or 30)
        health = "lost" if silent > limit else "silent" if silent > SILENT_S else "healthy"
        died, how = self._exits.get((name, int(member.get("pid") or 0)), (0.0, ""))
        if down := now - silent < died + LATE_S:  # or another process was given that number
            health = "down"
        self._note(name, life, health, silent, now)
        rate = self._rate(name, life, float(member.get("steps") or 0), now - silent)
        return {**member, "name": name, "silent_s": silent, "health": health,
                "words": f"{short_exit_text(how)}, restarting" if down else None,
                "rate": rate if health == "healthy" else None}

    def _hear_of_exits(self, now: float) -> None:
        first = not self._exits
        for each in _read(self._folder / EXITS_FILE).get("members", []):
            key, died, how = (str(each.get("name")), int(each.get("pid") or 0)), each.get("at"), str(each.get("how"))
            if not isinstance(died, int | float) or self._exits.get(key, (0.0, ""))[0] >= died:
                continue
            self._exits[key] = died, how
            if not first or now - died < RECENT_S:  # what happened long before anybody looked is no news
                self.events.append((died, f"{key[0]} {how}"))

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
            self.events.append((now, f"{name} restarted (start {life})"))
        elif health != before[1] and health != "down":  # which was told with its cause
            text = "heartbeat again" if health == "healthy" else f"no heartbeat for {silent:.0f} s"
            self.events.append((now, f"{name}: {text}"))
