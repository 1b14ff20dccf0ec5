"""Members of a fleet: small files in the run directory, read by the live page.

Every learner with actors writes the list of its members every second, in `fleet.json`, or `fleet-1.json` for a further
learner; the driver, as the parent process, writes how members exited.
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

MEMBERS_FILE, FURTHER_FILES, EXITS_FILE = "fleet.json", "fleet-[0-9]*.json", "exits.json"
MOST_EXITS = 50
SILENT_S = 5.0
"""Seconds without a heartbeat after which a member counts as silent. Heartbeats normally come every second."""

RATE_S = 10.0
RECENT_S = 60.0
LATE_S = 1.0
"""Seconds by which the last message of a process may arrive after its exit."""


def write_members(folder: Path, members: Sequence[Mapping[str, Any]]) -> None:
    """Write the current members of the run's main service: learner, learner 0 or coordinator."""
    _write(folder / MEMBERS_FILE, members)


def write_members_of(folder: Path, learner: int, members: Sequence[Mapping[str, Any]]) -> None:
    """Write the current members of a learner with a service of its own."""
    _write(folder / f"fleet-{learner}.json", members)


def remove_members_of_learners(folder: Path) -> None:
    """Remove the lists that learners of an earlier attempt have written: this one may have fewer."""
    for path in folder.glob(FURTHER_FILES):
        with suppress(OSError):
            path.unlink()


def member_files(folder: Path) -> list[Path]:
    """Existing lists of members; the one of the main service is first."""
    return [path for path in (folder / MEMBERS_FILE, *sorted(folder.glob(FURTHER_FILES))) if path.exists()]


def read_members(folder: Path) -> dict[str, Any]:
    """Return the members of all learners, as of the newest list; empty if there is no valid list."""
    lists = [found for path in member_files(folder) if (found := _read(path))]
    if not lists:
        return {}
    newest = max(found["at"] for found in lists)
    return {"at": newest, "members": [_as_of(newest, found["at"], member) for found in lists
                                      for member in found["members"]]}


def live_actors(folder: Path, learner: int | None) -> list[str]:
    """Names of the actors of a learner that it has heard of lately; None: the learner of the main service."""
    found = _read(folder / (MEMBERS_FILE if learner is None else f"fleet-{learner}.json"))
    since = time.time() - found["at"] if found else 0.0
    return [str(member.get("name")) for member in found.get("members", []) if member.get("role") == "actor"
            and float(member.get("silent_s") or 0) + since < float(member.get("live_s") or 30)]


def _as_of(now: float, written: float, member: dict[str, Any]) -> dict[str, Any]:
    """A member of a list written earlier, which has been silent since then."""
    return member if written == now else {**member, "silent_s": float(member.get("silent_s") or 0) + now - written}


def record_exit(folder: Path, name: str, pid: int, how: str) -> None:
    """Record the exit of a member with its cause, for example `was killed by SIGKILL: perhaps out of memory`."""
    known = _read(folder / EXITS_FILE).get("members", [])
    _write(folder / EXITS_FILE, [*known, {"at": time.time(), "name": name, "pid": pid, "how": how}][-MOST_EXITS:])


def _write(path: Path, members: Sequence[Mapping[str, Any]]) -> None:
    """Replace the file atomically, without a sync to disk: only the display depends on it."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(json.dumps({"at": time.time(), "members": list(members)}))
        temporary.replace(path)
    except OSError as error:
        log.debug("the list of members could not be written (%s)", error)


def _read(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError, RecursionError):
        with open_no_follow(path) as file:
            found = json.load(file)
        members = found.get("members") if isinstance(found, dict) else None
        if isinstance(members, list) and isinstance(found.get("at"), int | float):
            return {"at": found["at"], "members": [each for each in members if isinstance(each, dict)]}
    return {}


def short_exit_text(how: str) -> str:
    """Shorten the cause of an exit for a table cell: `killed (SIGKILL)`."""
    return re.sub(r"^was killed by (\w+).*", r"killed (\1)", how, flags=re.S)


class MemberMonitor:
    """Rate and health of the members at each poll, and the events since the first one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._steps: dict[tuple[str, int], deque[tuple[float, float]]] = {}
        self._health: dict[str, tuple[int, str]] = {}
        self._exits: dict[tuple[str, int], tuple[float, str]] = {}  # time and cause, by name and pid
        self.events: deque[tuple[float, str]] = deque(maxlen=50)

    def poll(self, now: float) -> list[dict[str, Any]]:
        """Return a row per member, with `rate` in steps per second and `health`: healthy, silent, down or lost.

        A member that is down has exited and is being restarted; `words` names the cause.
        """
        found = read_members(self._folder)
        self._read_exits(now)
        if not found:
            return []
        since = max(0.0, now - float(found["at"]))  # the file is no longer written once the learner is gone
        return [self._row(member, since, now) for member in found["members"]]

    def _row(self, member: Mapping[str, Any], since: float, now: float) -> dict[str, Any]:
        name, incarnation = str(member.get("name")), int(member.get("incarnation") or 1)
        silent, limit = float(member.get("silent_s") or 0) + since, float(member.get("live_s") or 30)
        health = "lost" if silent > limit else "silent" if silent > SILENT_S else "healthy"
        died, how = self._exits.get((name, int(member.get("pid") or 0)), (0.0, ""))
        if down := now - silent < died + LATE_S:  # otherwise another process has reused the pid
            health = "down"
        self._add_event(name, incarnation, health, silent, now)
        rate = self._rate(name, incarnation, float(member.get("steps") or 0), now - silent)
        return {**member, "name": name, "silent_s": silent, "health": health,
                "words": f"{short_exit_text(how)}, restarting" if down else None,
                "rate": rate if health == "healthy" else None}

    def _read_exits(self, now: float) -> None:
        first = not self._exits
        for each in _read(self._folder / EXITS_FILE).get("members", []):
            key, died, how = (str(each.get("name")), int(each.get("pid") or 0)), each.get("at"), str(each.get("how"))
            if not isinstance(died, int | float) or self._exits.get(key, (0.0, ""))[0] >= died:
                continue
            self._exits[key] = died, how
            if not first or now - died < RECENT_S:  # exits long before the first poll are not shown
                self.events.append((died, f"{key[0]} {how}"))

    def _rate(self, name: str, incarnation: int, steps: float, reported_at: float) -> float | None:
        marks = self._steps.setdefault((name, incarnation), deque())
        if not marks or steps != marks[-1][1]:
            marks.append((reported_at, steps))
        while len(marks) > 2 and marks[-1][0] - marks[0][0] > RATE_S:
            marks.popleft()
        (t0, s0), (t1, s1) = marks[0], marks[-1]
        return (s1 - s0) / (t1 - t0) if t1 > t0 else None

    def _add_event(self, name: str, incarnation: int, health: str, silent: float, now: float) -> None:
        before = self._health.get(name)
        self._health[name] = incarnation, health
        if before is None:
            return
        if incarnation > before[0]:
            self.events.append((now, f"{name} restarted (start {incarnation})"))
        elif health != before[1] and health != "down":  # reported with its cause by _read_exits
            text = "heartbeat again" if health == "healthy" else f"no heartbeat for {silent:.0f} s"
            self.events.append((now, f"{name}: {text}"))
