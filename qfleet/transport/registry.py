"""Who takes part in a fleet, and what of each has been stored: the two tables behind "once, and only once".

    session      a secret, drawn by every process that connects: the same session is the same life, whatever happens to
                 the line, and only its holder can speak for a place
    index        the place in the fleet: which arm it explores with; a restarted process keeps that of its name
    incarnation  how many lives an index has had; only the newest may speak
    memory       what an index has learnt for itself, such as a bandit; its next life is told
"""

from __future__ import annotations

import hmac
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any, Literal

import numpy as np

ROLES = ACTOR, LEARNER, EVALUATOR, SUPERVISOR = "actor", "cell", "evaluator", "supervisor"
MAX_PAST_INCARNATIONS = 64
"""Lives that ended and are still known: their last messages may wait in the inbox."""

FORGET_S = 1200.0
"""A member that joined and was silent for so long is forgotten: twice the time that members wait for a fleet."""

SessionStatus = Literal["current", "superseded", "unknown"]


class FleetFull(Exception):
    """As many members have joined as may."""


@dataclass(frozen=True)
class MemberRecord:
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
class Incarnation:
    """What is remembered of one incarnation of an index, living or not. `own`: the run started it, it did not join."""

    name: str
    index: int
    incarnation: int
    session: str
    role: str = ACTOR
    own: bool = True


class Registry:
    """Gives out places, knows who was heard of when, and tells a message from its repetition.

    At most `most` members that joined are there at once, and they are forgotten when they have been silent for long.
    RPC threads call `hello`, `heard` and `left`; the main thread calls `fresh` and is the only one to change what has
    been stored, so a checkpoint that it makes agrees with the replay.
    """

    def __init__(self, actors: int, live_s: float, most: int = 1024) -> None:
        self.actors, self.live_s, self.most = actors, live_s, most
        self._lock = threading.Lock()
        self._incarnations: dict[tuple[int, int], Incarnation] = {}
        self._newest: dict[int, Incarnation] = {}
        self._members: dict[int, MemberRecord] = {}
        self._seen: dict[int, float] = {}  # when each index was last heard of, or loaded
        self._stored: dict[str, int] = {}
        self._memories: dict[int, bytes] = {}

    def hello(self, name: str, role: str, host: str, pid: int, session: str, own: bool = True) -> tuple[int, int]:
        """A place in the fleet: (index, incarnation). The same life keeps both, a new one of that name the index.

        FleetFull for a member that joins (not `own`) when there are too many of those.
        """
        with self._lock:
            self._expire()
            index = self._place(name, role)
            if not own and not self._occupied(index) and self._joined() >= self.most:
                raise FleetFull(f"{self.most} members have joined, which is as many as fleet.max_members allows")
            life = self._newest.get(index)
            if life is None or life.session != session:
                if own and life is not None and not life.own:
                    self._memories.pop(index, None)  # the run's own processes believe nothing that others left
                life = Incarnation(name, index, life.incarnation + 1 if life else 1, session, role, own)
                self._newest[index] = self._incarnations[index, life.incarnation] = life
                self._forget()
            self._seen[index] = time.monotonic()
            before = self._members.get(index)
            self._members[index] = (
                replace(before, heard=time.monotonic()) if before is not None and before.session == session else
                MemberRecord(name, role, host, pid, index, life.incarnation, session, time.monotonic()))
            return index, life.incarnation

    def owns_session(self, index: int, incarnation: int, session: str) -> bool:
        """Whether this is the secret of a life that is known."""
        with self._lock:
            life = self._incarnations.get((index, incarnation))
        return life is not None and hmac.compare_digest(life.session.encode(), session.encode())

    def role(self, index: int, incarnation: int) -> str:
        """Of a life that is known; empty of any other."""
        with self._lock:
            life = self._incarnations.get((index, incarnation))
        return "" if life is None else life.role

    def joined(self, index: int, incarnation: int) -> bool:
        """Whether a life is not of a process that the run started."""
        with self._lock:
            life = self._incarnations.get((index, incarnation))
        return life is None or not life.own

    def record_heartbeat(self, index: int, incarnation: int, steps: int, version: int) -> SessionStatus:
        """Note a sign of life. `superseded`: a newer process has this name; `unknown`: it must say hello."""
        with self._lock:
            member, life = self._members.get(index), self._incarnations.get((index, incarnation))
            if member is None or life is None:
                return "unknown"
            if member.incarnation != incarnation:
                return "superseded" if member.name == life.name else "unknown"
            self._seen[index] = time.monotonic()
            self._members[index] = replace(member, heard=self._seen[index], steps=steps, version=version)
            return "current"

    def deregister(self, index: int, incarnation: int) -> None:
        """Somebody went away on purpose."""
        with self._lock:
            if (member := self._members.get(index)) is not None and member.incarnation == incarnation:
                del self._members[index]

    def members(self) -> tuple[MemberRecord, ...]:
        """All that said hello and did not leave, by index; those that died are among them, silent."""
        with self._lock:
            self._expire()
            return tuple(self._members[index] for index in sorted(self._members))

    def accept_sequence(self, index: int, incarnation: int, sequence: int) -> bool:
        """Whether a message has not been stored yet; from now on it counts as stored. For the main thread."""
        with self._lock:
            life = self._incarnations.get((index, incarnation))
            if life is None or sequence <= self._stored.get(life.session, 0):
                return False
            self._stored[life.session] = sequence
            return True

    def set_member_state(self, index: int, memory: bytes) -> None:
        """What the next life of this place is to know. For the main thread."""
        with self._lock:
            self._memories[index] = memory

    def member_state(self, index: int) -> bytes:
        with self._lock:
            return self._memories.get(index, b"")

    def state_dict(self) -> dict[str, Any]:
        with self._lock:
            return {"lives": [list(astuple(life)) for life in self._incarnations.values()],
                    "stored": dict(self._stored),
                    "memories": {str(index): np.frombuffer(memory, np.uint8).copy()
                                 for index, memory in self._memories.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Names keep their places and sessions their counts; who is alive is seen when they say hello."""
        with self._lock:
            lives = [Incarnation(str(name), int(index), int(incarnation), str(session), *more)
                     for name, index, incarnation, session, *more in state["lives"]]
            self._incarnations = {(life.index, life.incarnation): life for life in lives}
            self._newest = {life.index: life for life in sorted(lives, key=lambda life: life.incarnation)}
            self._stored = {str(session): int(sequence) for session, sequence in state["stored"].items()}
            self._memories = {int(index): bytes(memory) for index, memory in state.get("memories", {}).items()}
            self._members = {}
            self._seen = dict.fromkeys(self._newest, time.monotonic())

    def _place(self, name: str, role: str) -> int:
        numbered = {ACTOR: "local", LEARNER: "cell"}
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

    def _joined(self) -> int:
        """Members that joined and live."""
        return sum(not life.own and self._occupied(index) for index, life in self._newest.items())

    def _expire(self) -> None:
        """Forget members that joined and have been silent for long, with all that was kept for them."""
        now = time.monotonic()
        late = [index for index, life in self._newest.items() if not life.own and now - self._seen[index] > FORGET_S]
        for index in late:
            del self._newest[index], self._seen[index]
            self._members.pop(index, None)
            self._memories.pop(index, None)
        if late:
            self._incarnations = {place: life for place, life in self._incarnations.items() if place[0] not in late}
            self._forget()

    def _forget(self) -> None:
        """Drop the oldest lives that ended; dicts keep the order in which they began."""
        current = {life.session for life in self._newest.values()}
        ended = [place for place, life in self._incarnations.items() if life.session not in current]
        for place in ended[:-MAX_PAST_INCARNATIONS]:
            del self._incarnations[place]
        known = {life.session for life in self._incarnations.values()}
        self._stored = {session: sequence for session, sequence in self._stored.items() if session in known}
