"""Members of a fleet and the messages stored from each; ensures that every message is stored exactly once.

    session      secret drawn by every process that connects: the same session is the same process, whatever happens
                 to the connection, and only its holder can send for an index
    index        position in the fleet, which selects the exploration parameters; a restarted process keeps its name's
    incarnation  number of processes that an index has had; only the newest may send
    memory       state of an index, such as a bandit; the next incarnation receives it
"""

from __future__ import annotations

import hmac
import re
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any, Literal

import numpy as np

ROLES = ACTOR, LEARNER, EVALUATOR = "actor", "learner", "evaluator"
MAX_PAST_INCARNATIONS = 64
"""Ended incarnations that are still known: their last messages may be in the inbox."""

FORGET_S = 1200.0
"""A joined member that was silent for this long is forgotten: twice the time that members wait for a fleet."""

SessionStatus = Literal["current", "superseded", "unknown"]


class FleetFull(Exception):
    """The limit of joined members is reached."""


@dataclass(frozen=True)
class MemberRecord:
    """One registered process. `heard` is a monotonic time; `steps` and `version` are as last reported."""

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
    """One incarnation of an index, running or not. `own`: the run started it, it did not join."""

    name: str
    index: int
    incarnation: int
    session: str
    role: str = ACTOR
    own: bool = True


def merge_registries(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """State of one registry with the members of several learners, in their order.

    After a change of their number several learners know a member. The one that it belonged to has its newest state:
    members are divided by their index.
    """
    given = list(states)
    merged: dict[str, Any] = {"lives": [], "stored": {}, "memories": {}}
    for learner, state in enumerate(given):
        merged["lives"] += [life for life in state["lives"] if life not in merged["lives"]]
        for session, sequence in state["stored"].items():
            merged["stored"][session] = max(sequence, merged["stored"].get(session, 0))
        for index, memory in state.get("memories", {}).items():
            if index not in merged["memories"] or int(index) % len(given) == learner:
                merged["memories"][index] = memory
    return merged


class Registry:
    """Assigns indices, tracks heartbeats, and recognises repeated messages.

    `actors` are those that the run starts. Of several learners with actors, learner `share` of `shares` assigns every
    `shares`-th of the further indices, so that all indices of the run differ. At most `most` joined members are
    registered at once; they are forgotten after a long silence. RPC threads call
    `hello`, `record_heartbeat` and `deregister`. Only the main thread calls `accept_sequence` and changes what has
    been stored, so a checkpoint that it makes agrees with the replay.
    """

    def __init__(self, actors: int, live_s: float, most: int = 1024, share: int = 0, shares: int = 1) -> None:
        self.actors, self.live_s, self.most = actors, live_s, most
        self._first_joined, self._stride = actors + (share - actors) % shares, shares
        self._lock = threading.Lock()
        self._incarnations: dict[tuple[int, int], Incarnation] = {}
        self._newest: dict[int, Incarnation] = {}
        self._members: dict[int, MemberRecord] = {}
        self._seen: dict[int, float] = {}  # time of each index's last heartbeat, or of loading
        self._stored: dict[str, int] = {}
        self._member_states: dict[int, bytes] = {}

    def hello(self, name: str, role: str, host: str, pid: int, session: str, own: bool = True) -> tuple[int, int]:
        """Register a process; returns (index, incarnation).

        The same session keeps both, a new one of that name the index.

        FleetFull for a joining member (not `own`) at the limit.
        """
        with self._lock:
            self._expire()
            index = self._index_of(name, role)
            if not own and not self._occupied(index) and self._joined() >= self.most:
                raise FleetFull(f"{self.most} members have joined, the limit of fleet.max_members")
            entry = self._newest.get(index)
            if entry is None or entry.session != session:
                if own and entry is not None and not entry.own:
                    self._member_states.pop(index, None)  # the run's own processes do not trust state of joined members
                entry = Incarnation(name, index, entry.incarnation + 1 if entry else 1, session, role, own)
                self._newest[index] = self._incarnations[index, entry.incarnation] = entry
                self._drop_ended()
            self._seen[index] = time.monotonic()
            before = self._members.get(index)
            self._members[index] = (
                replace(before, heard=time.monotonic()) if before is not None and before.session == session else
                MemberRecord(name, role, host, pid, index, entry.incarnation, session, time.monotonic()))
            return index, entry.incarnation

    def owns_session(self, index: int, incarnation: int, session: str) -> bool:
        """True if `session` is the secret of this incarnation."""
        with self._lock:
            entry = self._incarnations.get((index, incarnation))
        return entry is not None and hmac.compare_digest(entry.session.encode(), session.encode())

    def role(self, index: int, incarnation: int) -> str:
        """Role of a known incarnation; otherwise empty."""
        with self._lock:
            entry = self._incarnations.get((index, incarnation))
        return "" if entry is None else entry.role

    def joined(self, index: int, incarnation: int) -> bool:
        """True unless the run itself started this incarnation."""
        with self._lock:
            entry = self._incarnations.get((index, incarnation))
        return entry is None or not entry.own

    def record_heartbeat(self, index: int, incarnation: int, steps: int, version: int) -> SessionStatus:
        """Record a heartbeat. `superseded`: a newer process has this name; `unknown`: the sender must send hello."""
        with self._lock:
            member, entry = self._members.get(index), self._incarnations.get((index, incarnation))
            if member is None or entry is None:
                return "unknown"
            if member.incarnation != incarnation:
                return "superseded" if member.name == entry.name else "unknown"
            self._seen[index] = time.monotonic()
            self._members[index] = replace(member, heard=self._seen[index], steps=steps, version=version)
            return "current"

    def deregister(self, index: int, incarnation: int) -> None:
        """Remove a member that left on purpose."""
        with self._lock:
            if (member := self._members.get(index)) is not None and member.incarnation == incarnation:
                del self._members[index]

    def members(self) -> tuple[MemberRecord, ...]:
        """All registered members that did not leave, by index; dead ones are included, with an old `heard`."""
        with self._lock:
            self._expire()
            return tuple(self._members[index] for index in sorted(self._members))

    def accept_sequence(self, index: int, incarnation: int, sequence: int) -> bool:
        """True if a message has not been stored yet, and count it as stored. For the main thread."""
        with self._lock:
            entry = self._incarnations.get((index, incarnation))
            if entry is None or sequence <= self._stored.get(entry.session, 0):
                return False
            self._stored[entry.session] = sequence
            return True

    def set_member_state(self, index: int, state: bytes) -> None:
        """Set the state that the next incarnation of this index receives. For the main thread."""
        with self._lock:
            self._member_states[index] = state

    def member_state(self, index: int) -> bytes:
        with self._lock:
            return self._member_states.get(index, b"")

    def state_dict(self) -> dict[str, Any]:
        with self._lock:
            return {"lives": [list(astuple(entry)) for entry in self._incarnations.values()],
                    "stored": dict(self._stored),
                    "memories": {str(index): np.frombuffer(state, np.uint8).copy()
                                 for index, state in self._member_states.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore indices of names and sequences of sessions; members count as alive when they send hello."""
        with self._lock:
            entries = [Incarnation(str(name), int(index), int(incarnation), str(session), *more)
                     for name, index, incarnation, session, *more in state["lives"]]
            self._incarnations = {(entry.index, entry.incarnation): entry for entry in entries}
            self._newest = {entry.index: entry for entry in sorted(entries, key=lambda entry: entry.incarnation)}
            self._stored = {str(session): int(sequence) for session, sequence in state["stored"].items()}
            self._member_states = {int(index): bytes(value) for index, value in state.get("memories", {}).items()}
            self._members = {}
            self._seen = dict.fromkeys(self._newest, time.monotonic())

    def _index_of(self, name: str, role: str) -> int:
        if role in (ACTOR, LEARNER) and (match := re.fullmatch(rf"{role}/([0-9]{{1,6}})", name)):
            return int(match[1])
        for entry in self._newest.values():
            if entry.name == name:
                return entry.index
        index, stride = (self._first_joined, self._stride) if role == ACTOR else (-1, -1)
        while self._occupied(index):
            index += stride
        return index

    def _occupied(self, index: int) -> bool:
        member = self._members.get(index)
        return member is not None and time.monotonic() - member.heard < self.live_s

    def _joined(self) -> int:
        """Number of joined members that are alive."""
        return sum(not entry.own and self._occupied(index) for index, entry in self._newest.items())

    def _expire(self) -> None:
        """Forget joined members that have been silent for `FORGET_S`, with their state."""
        now = time.monotonic()
        expired = [index for index, entry in self._newest.items()
                   if not entry.own and now - self._seen[index] > FORGET_S]
        for index in expired:
            del self._newest[index], self._seen[index]
            self._members.pop(index, None)
            self._member_states.pop(index, None)
        if expired:
            self._incarnations = {key: entry for key, entry in self._incarnations.items() if key[0] not in expired}
            self._drop_ended()

    def _drop_ended(self) -> None:
        """Drop the oldest ended incarnations; dicts keep the order in which they began."""
        current = {entry.session for entry in self._newest.values()}
        ended = [key for key, entry in self._incarnations.items() if entry.session not in current]
        for key in ended[:-MAX_PAST_INCARNATIONS]:
            del self._incarnations[key]
        known = {entry.session for entry in self._incarnations.values()}
        self._stored = {session: sequence for session, sequence in self._stored.items() if session in known}
