"""Who takes part in a fleet, and what of each has been stored: the two tables behind "once, and only once".

    session      drawn by every process that connects; the same session is the same life, whatever happens to the line
    index        the place in the fleet: which arm it explores with; a restarted process keeps that of its name
    incarnation  how many lives an index has had; only the newest may speak
    memory       what an index has learnt for itself, such as a bandit; its next life is told
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

ACTOR, CELL = "actor", "cell"
REMEMBERED = 64
"""Lives that ended and are still known: their last messages may wait in the inbox."""

Standing = Literal["current", "superseded", "unknown"]


@dataclass(frozen=True)
class Member:
    """One process of the fleet. `heard` is a monotonic time, `steps` and `version` are as it said last."""

    name: str
    role: str
    host: str
    pid: int
    index: int
    incarnation: int
    session: str
    heard: float
    steps: int = 0
    version: int = -1


@dataclass(frozen=True)
class Life:
    """What is remembered of one incarnation of an index, living or not."""

    name: str
    index: int
    incarnation: int
    session: str


class Registry:
    """Gives out places, knows who was heard of when, and tells a message from its repetition.

    RPC threads call `hello`, `heard` and `left`; the main thread calls `fresh` and is the only one to change what has
    been stored, so a checkpoint that it makes agrees with the replay.
    """

    def __init__(self, actors: int, live_s: float) -> None:
        self.actors, self.live_s = actors, live_s
        self._lock = threading.Lock()
        self._lives: dict[tuple[int, int], Life] = {}
        self._newest: dict[int, Life] = {}
        self._members: dict[int, Member] = {}
        self._stored: dict[str, int] = {}
        self._memories: dict[int, bytes] = {}

    def hello(self, name: str, role: str, host: str, pid: int, session: str) -> tuple[int, int]:
        """A place in the fleet: (index, incarnation). The same life keeps both, a new one of that name the index."""
        with self._lock:
            index = self._place(name, role)
            life = self._newest.get(index)
            if life is None or life.session != session:
                life = Life(name, index, life.incarnation + 1 if life else 1, session)
                self._newest[index] = self._lives[index, life.incarnation] = life
                self._forget()
            before = self._members.get(index)
            self._members[index] = (
                replace(before, heard=time.monotonic()) if before is not None and before.session == session else
                Member(name, role, host, pid, index, life.incarnation, session, time.monotonic()))
            return index, life.incarnation

    def heard(self, index: int, incarnation: int, steps: int, version: int) -> Standing:
        """Note a sign of life. `superseded`: a newer process has this name; `unknown`: it must say hello."""
        with self._lock:
            member, life = self._members.get(index), self._lives.get((index, incarnation))
            if member is None or life is None:
                return "unknown"
            if member.incarnation != incarnation:
                return "superseded" if member.name == life.name else "unknown"
            self._members[index] = replace(member, heard=time.monotonic(), steps=steps, version=version)
            return "current"

    def left(self, index: int, incarnation: int) -> None:
        """Somebody went away on purpose."""
        with self._lock:
            if (member := self._members.get(index)) is not None and member.incarnation == incarnation:
                del self._members[index]

    def members(self) -> tuple[Member, ...]:
        """Everybody who said hello and did not leave, by index; who died is among them, silent."""
        with self._lock:
            return tuple(self._members[index] for index in sorted(self._members))

    def fresh(self, index: int, incarnation: int, sequence: int) -> bool:
        """Whether a message has not been stored yet; from now on it counts as stored. For the main thread."""
        with self._lock:
            life = self._lives.get((index, incarnation))
            if life is None or sequence <= self._stored.get(life.session, 0):
                return False
            self._stored[life.session] = sequence
            return True

    def remember(self, index: int, memory: bytes) -> None:
        """What the next life of this place is to know. For the main thread."""
        with self._lock:
            self._memories[index] = memory

    def memory(self, index: int) -> bytes:
        with self._lock:
            return self._memories.get(index, b"")

    def state_dict(self) -> dict[str, Any]:
        with self._lock:
            return {"lives": [[life.name, life.index, life.incarnation, life.session] for life in self._lives.values()],
                    "stored": dict(self._stored),
                    "memories": {str(index): np.frombuffer(memory, np.uint8).copy()
                                 for index, memory in self._memories.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Names keep their places and sessions their counts; who is alive is seen when they say hello."""
        with self._lock:
            lives = [Life(str(name), int(index), int(incarnation), str(session))
                     for name, index, incarnation, session in state["lives"]]
            self._lives = {(life.index, life.incarnation): life for life in lives}
            self._newest = {life.index: life for life in sorted(lives, key=lambda life: life.incarnation)}
            self._stored = {str(session): int(sequence) for session, sequence in state["stored"].items()}
            self._memories = {int(index): bytes(memory) for index, memory in state.get("memories", {}).items()}
            self._members = {}

    def _place(self, name: str, role: str) -> int:
        numbered = {ACTOR: "local", CELL: "cell"}
        if role in numbered and (place := re.fullmatch(rf"{numbered[role]}/([0-9]{{1,6}})", name)):
            return int(place[1])
        for life in self._newest.values():
            if life.name == name:
                return life.index
        index, stride = (self.actors, 1) if role == ACTOR else (-1, -1)
        while self._occupied(index):
            index += stride
        return index

    def _occupied(self, index: int) -> bool:
        member = self._members.get(index)
        return member is not None and time.monotonic() - member.heard < self.live_s

    def _forget(self) -> None:
        """Drop the oldest lives that ended; dicts keep the order in which they began."""
        current = {life.session for life in self._newest.values()}
        ended = [place for place, life in self._lives.items() if life.session not in current]
        for place in ended[:-REMEMBERED]:
            del self._lives[place]
        known = {life.session for life in self._lives.values()}
        self._stored = {session: sequence for session, sequence in self._stored.items() if session in known}
