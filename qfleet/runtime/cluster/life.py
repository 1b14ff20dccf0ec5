"""A life of a supervisor's child that is lived in a Ray actor.

    awaited ──▶ the host answers ──▶ begin ──▶ at work ──▶ it says how its job ended
       ▲                                          └──────▶ another process answers, or none has a job: it died
       └── as long as it takes: Ray starts a process anew where there is room, and perhaps there is none yet

Ray restarts the actor (`max_restarts=-1`), be it on another node; whether and when it is given a job again is decided
by the supervisor, as for processes. Its place in the fleet is its name's.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from qfleet.runtime.cluster.host import Look
from qfleet.runtime.life import Child, log_end, open_log
from qfleet.runtime.supervise import DONE, USER_ERROR, VAIN

LOOK_S = 0.25
"""How often a host is looked at."""

GONE = "is gone: its process died, or its node"
FINAL = (USER_ERROR, VAIN)
LOST = 3
"""What a job ends with that cannot go on since another one was lost."""

CULPRIT_S = 10.0
"""So long after a job says so, the one that was lost is waited for: Ray takes a while to notice."""


class Stand:
    """A Ray actor that is there for a child as long as the run lasts, whatever becomes of its process."""

    def __init__(self, create: Callable[[], Any], job: Callable[..., int], *args: Any) -> None:
        self._create, self.job, self.args = create, job, args
        self._handle: Any = None
        self.former = ""  # the process that was ended last: it may answer once more

    @property
    def handle(self) -> Any:
        if self._handle is None:
            self._handle = self._create()
        return self._handle

    def begin(self, number: int) -> Any:
        return self.handle.begin.remote(number, self.job, *self.args)

    def end(self, process: str, for_good: bool) -> None:
        import ray

        self.former = process
        if self._handle is not None:
            with contextlib.suppress(Exception):  # it is dead already, or Ray is
                ray.kill(self._handle, no_restart=for_good)

    def forget(self) -> None:
        """Ray will not start it again: the next life has another actor."""
        self._handle = None


class RayLife:
    """Implements `life.Life`. `heard` gets every word that the host says."""

    def __init__(self, stand: Stand, child: Child, number: int, now: float, heard: Callable[[str], object]) -> None:
        self.beats, self.first_beat, self.last_beat = False, now, now
        self.verdict: str | None = None
        self.pid = 0
        self._stand, self._number, self._heard = stand, number, heard
        self._path = child.log_path
        with open_log(child, number) as log:
            self._log_start = log.tell()
        self._asked = self._killed = self._missed = False
        self._self = ""
        self._count = self._noted = 0
        self._word = ""
        self._code: int | None = None
        self._call: Any = None
        self._not_before = 0.0
        self.may_begin: Callable[[], bool] = lambda: True

    @property
    def code(self) -> int | None:
        """How the job ended, if it has."""
        return self._code

    @property
    def awaited(self) -> bool:
        """Whether there is no process yet: Ray looks for a node with room."""
        return not self._self

    @property
    def absent(self) -> bool:
        """Whether nobody answers at present."""
        return self.awaited or self._missed

    @property
    def exited(self) -> bool:
        if self._killed:
            return True
        self._look()
        return self._code is not None

    def listen(self, now: float) -> None:
        """Take note of the child's beats; as long as there is no process, nobody is silent."""
        self._look()
        if self.awaited:
            self.first_beat = self.last_beat = now
        elif self._count > self._noted:  # also by a look of `exited`
            self._noted = self._count
            self.first_beat = self.first_beat if self.beats else now
            self.last_beat, self.beats = now, True

    def ask(self) -> None:
        if self.awaited and not self._asked:
            self._code = -signal.SIGTERM
        self._asked = True
        with contextlib.suppress(Exception):
            self._stand.handle.leave.remote()

    def kill(self, for_good: bool | None = None) -> None:
        """End the process; Ray starts another, unless this child was asked to leave, or has done what it could."""
        if self._killed:
            return
        self._killed = True
        if for_good is None:
            for_good = self._asked or self._code in (DONE, *FINAL)
        if for_good or self.verdict != GONE:
            self._stand.end(self._self, for_good)
        else:
            self._stand.former = self._self  # another process is there already, and has no job yet

    def bury(self) -> int:
        return -signal.SIGKILL if self._code is None else self._code

    def written(self) -> str:
        """Its log, where this node can read it; else what the process said last."""
        found = log_end(self._path, self._log_start)
        return found if self._word in found else f"{found}{self._word}"

    def _look(self) -> None:
        """Take in an answer, and ask again after a while; never waits."""
        import ray

        if self._call is not None:
            if not ray.wait([self._call], timeout=0)[0]:
                return
            call, self._call = self._call, None
            self._not_before = time.monotonic() + LOOK_S
            self._missed = True
            try:
                self._take(ray.get(call))
                self._missed = False
            except ray.exceptions.ActorUnavailableError:
                pass  # between two processes, or the call was lost: the next answer tells
            except ray.exceptions.ActorDiedError as error:
                self._stand.forget()
                self._code, self.verdict, self._word = -signal.SIGKILL, GONE, str(error)
            except ray.exceptions.RayError:
                pass
        if self._code is None and time.monotonic() >= self._not_before:
            with contextlib.suppress(Exception):
                if self._asked:  # the call may have been lost, and to be asked twice changes nothing
                    self._stand.handle.leave.remote()
                self._call = self._stand.handle.look.remote()

    def _take(self, look: Look) -> None:
        if self._code is not None or look.self == self._stand.former:
            return
        if self._self and look.self != self._self:
            self._code, self.verdict = -signal.SIGKILL, GONE
            return
        self._self, self.pid = look.self, look.pid
        if look.number != self._number:
            if self.may_begin():
                self._stand.begin(self._number)
            return
        self._count = look.beats
        if look.word != self._word:
            self._word = look.word
            self._heard(look.word)
        self._code = look.code


class Joint:
    """Implements `life.Life`: several that are one. Their jobs begin when all hosts are there; with the first that
    fails all end, and they are done when all are."""

    def __init__(self, lives: Sequence[RayLife], now: float) -> None:
        self.beats, self.first_beat, self.last_beat = False, now, now
        self.verdict: str | None = None
        self._lives = lives
        self._asked = self._killed = False
        self._failed_at: float | None = None
        for life in lives:
            life.may_begin = lambda: not self.awaited

    @property
    def pid(self) -> int:
        return self._lives[0].pid

    @property
    def awaited(self) -> bool:
        return any(life.awaited for life in self._lives)

    @property
    def absent(self) -> bool:
        return any(life.absent for life in self._lives)

    @property
    def exited(self) -> bool:
        if self._killed:
            return True
        codes = [life.code for life in self._lives if life.exited]
        if len(codes) < len(self._lives) and all(code in (DONE, LOST) for code in codes) and not self._overdue(codes):
            return False
        number, culprit = self._culprit()
        if culprit.code == LOST:
            self.verdict = "lost the connection between its members"
        elif culprit.code is None or culprit.verdict is not None:
            self.verdict = f"lost its member {number}, which {culprit.verdict or 'does not answer'}"
        return True

    def listen(self, now: float) -> None:
        """As long as somebody is awaited, nobody is silent: their jobs have not begun."""
        for life in self._lives:
            life.listen(now)
            if self.awaited:
                life.first_beat = life.last_beat = now
        self.beats = all(life.beats for life in self._lives)
        self.first_beat = max(life.first_beat for life in self._lives)
        self.last_beat = min(life.last_beat for life in self._lives)

    def ask(self) -> None:
        self._asked = True
        for life in self._lives:
            life.ask()

    def kill(self) -> None:
        if self._killed:
            return
        self._killed = True
        code = self._culprit()[1].code
        for life in self._lives:
            life.kill(self._asked or code in (DONE, *FINAL))

    def bury(self) -> int:
        code = self._culprit()[1].bury()
        return -signal.SIGKILL if code == LOST else code  # so that our verdict is what people read

    def written(self) -> str:
        return self._culprit()[1].written()

    def _overdue(self, codes: Sequence[int | None]) -> bool:
        """Whether somebody has been lost for long, and nobody says who."""
        if LOST in codes and self._failed_at is None:
            self._failed_at = time.monotonic()
        return self._failed_at is not None and time.monotonic() - self._failed_at > CULPRIT_S

    def _culprit(self) -> tuple[int, RayLife]:
        """Who has failed for a reason of its own; or else who does not answer, or was silent for longest."""
        def guilt(member: tuple[int, RayLife]) -> tuple[bool, bool, bool, float]:
            life = member[1]
            silent = life.code is None and (life.absent or self.verdict is not None)
            return life.code in FINAL, life.code not in (None, DONE, LOST), silent, -life.last_beat

        return max(enumerate(self._lives), key=guilt)
