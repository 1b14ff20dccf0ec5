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

from qfleet.process.handle import ChildSpec, open_log, read_log_tail
from qfleet.process.supervisor import EXIT_OK, EXIT_UNRECOVERABLE, EXIT_USER_ERROR
from qfleet.transport.ray_host import HostStatus

LOOK_S = 0.25
"""How often a host is looked at."""

GONE = "is gone: its process died, or its node"
FINAL_EXIT_CODES = (EXIT_USER_ERROR, EXIT_UNRECOVERABLE)
EXIT_PEER_LOST = 3
"""What a job ends with that cannot go on since another one was lost."""

CULPRIT_S = 10.0
"""So long after a job says so, the one that was lost is waited for: Ray takes a while to notice."""


class RayActorSlot:
    """A Ray actor that is there for a child as long as the run lasts, whatever becomes of its process."""

    def __init__(self, create: Callable[[], Any], job: Callable[..., int], *args: Any) -> None:
        self._create, self.job, self.args = create, job, args
        self._handle: Any = None
        self.killed_process = ""  # the process that was ended last: it may answer once more

    @property
    def handle(self) -> Any:
        if self._handle is None:
            self._handle = self._create()
        return self._handle

    def start_job(self, number: int) -> Any:
        return self.handle.begin.remote(number, self.job, *self.args)

    def kill(self, process: str, for_good: bool) -> None:
        import ray

        self.killed_process = process
        if self._handle is not None:
            with contextlib.suppress(Exception):  # it is dead already, or Ray is
                ray.kill(self._handle, no_restart=for_good)

    def discard_handle(self) -> None:
        """Ray will not start it again: the next life has another actor."""
        self._handle = None


class RayProcessHandle:
    """Implements `life.Life`. `heard` gets every word that the host says."""

    def __init__(
        self, stand: RayActorSlot, child: ChildSpec, number: int, now: float, heard: Callable[[str], object]
    ) -> None:
        self.beats, self.first_beat, self.last_beat = False, now, now
        self.kill_reason: str | None = None
        self.pid = 0
        self._slot, self._number, self._heard = stand, number, heard
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
        self.may_start: Callable[[], bool] = lambda: True

    @property
    def code(self) -> int | None:
        """How the job ended, if it has."""
        return self._code

    @property
    def is_starting(self) -> bool:
        """Whether there is no process yet: Ray looks for a node with room."""
        return not self._self

    @property
    def is_unreachable(self) -> bool:
        """Whether nobody answers at present."""
        return self.is_starting or self._missed

    @property
    def exited(self) -> bool:
        if self._killed:
            return True
        self._look()
        return self._code is not None

    def poll_heartbeat(self, now: float) -> None:
        """Take note of the child's beats; as long as there is no process, nobody is silent."""
        self._look()
        if self.is_starting:
            self.first_beat = self.last_beat = now
        elif self._count > self._noted:  # also by a look of `exited`
            self._noted = self._count
            self.first_beat = self.first_beat if self.beats else now
            self.last_beat, self.beats = now, True

    def request_stop(self) -> None:
        if self.is_starting and not self._asked:
            self._code = -signal.SIGTERM
        self._asked = True
        with contextlib.suppress(Exception):
            self._slot.handle.leave.remote()

    def kill(self, for_good: bool | None = None) -> None:
        """End the process; Ray starts another, unless this child was asked to leave, or has done what it could."""
        if self._killed:
            return
        self._killed = True
        if for_good is None:
            for_good = self._asked or self._code in (EXIT_OK, *FINAL_EXIT_CODES)
        if for_good or self.kill_reason != GONE:
            self._slot.kill(self._self, for_good)
        else:
            self._slot.killed_process = self._self  # another process is there already, and has no job yet

    def reap(self) -> int:
        return -signal.SIGKILL if self._code is None else self._code

    def log_tail(self) -> str:
        """Its log, where this node can read it; else what the process said last."""
        found = read_log_tail(self._path, self._log_start)
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
                self._slot.discard_handle()
                self._code, self.kill_reason, self._word = -signal.SIGKILL, GONE, str(error)
            except ray.exceptions.RayError:
                pass
        if self._code is None and time.monotonic() >= self._not_before:
            with contextlib.suppress(Exception):
                if self._asked:  # the call may have been lost, and to be asked twice changes nothing
                    self._slot.handle.leave.remote()
                self._call = self._slot.handle.look.remote()

    def _take(self, look: HostStatus) -> None:
        if self._code is not None or look.process_token == self._slot.killed_process:
            return
        if self._self and look.process_token != self._self:
            self._code, self.kill_reason = -signal.SIGKILL, GONE
            return
        self._self, self.pid = look.process_token, look.pid
        if look.number != self._number:
            if self.may_start():
                self._slot.start_job(self._number)
            return
        self._count = look.beats
        if look.message != self._word:
            self._word = look.message
            self._heard(look.message)
        self._code = look.code


class RestartGroup:
    """Implements `life.Life`: several that are one. Their jobs begin when all hosts are there; with the first that
    fails all end, and they are done when all are."""

    def __init__(self, lives: Sequence[RayProcessHandle], now: float) -> None:
        self.beats, self.first_beat, self.last_beat = False, now, now
        self.kill_reason: str | None = None
        self._handles = lives
        self._asked = self._killed = False
        self._failed_at: float | None = None
        for life in lives:
            life.may_start = lambda: not self.is_starting

    @property
    def pid(self) -> int:
        return self._handles[0].pid

    @property
    def is_starting(self) -> bool:
        return any(life.is_starting for life in self._handles)

    @property
    def is_unreachable(self) -> bool:
        return any(life.is_unreachable for life in self._handles)

    @property
    def exited(self) -> bool:
        if self._killed:
            return True
        codes = [life.code for life in self._handles if life.exited]
        if (
            len(codes) < len(self._handles)
            and all(code in (EXIT_OK, EXIT_PEER_LOST) for code in codes)
            and not self._overdue(codes)
        ):
            return False
        number, culprit = self._culprit()
        if culprit.code == EXIT_PEER_LOST:
            self.kill_reason = "lost the connection between its members"
        elif culprit.code is None or culprit.kill_reason is not None:
            self.kill_reason = f"lost its member {number}, which {culprit.kill_reason or 'does not answer'}"
        return True

    def poll_heartbeat(self, now: float) -> None:
        """As long as somebody is awaited, nobody is silent: their jobs have not begun."""
        for life in self._handles:
            life.poll_heartbeat(now)
            if self.is_starting:
                life.first_beat = life.last_beat = now
        self.beats = all(life.beats for life in self._handles)
        self.first_beat = max(life.first_beat for life in self._handles)
        self.last_beat = min(life.last_beat for life in self._handles)

    def request_stop(self) -> None:
        self._asked = True
        for life in self._handles:
            life.request_stop()

    def kill(self) -> None:
        if self._killed:
            return
        self._killed = True
        code = self._culprit()[1].code
        for life in self._handles:
            life.kill(self._asked or code in (EXIT_OK, *FINAL_EXIT_CODES))

    def reap(self) -> int:
        code = self._culprit()[1].reap()
        return -signal.SIGKILL if code == EXIT_PEER_LOST else code  # so that our verdict is what people read

    def log_tail(self) -> str:
        return self._culprit()[1].log_tail()

    def _overdue(self, codes: Sequence[int | None]) -> bool:
        """Whether somebody has been lost for long, and nobody says who."""
        if EXIT_PEER_LOST in codes and self._failed_at is None:
            self._failed_at = time.monotonic()
        return self._failed_at is not None and time.monotonic() - self._failed_at > CULPRIT_S

    def _culprit(self) -> tuple[int, RayProcessHandle]:
        """Who has failed for a reason of its own; or else who does not answer, or was silent for longest."""
        def guilt(member: tuple[int, RayProcessHandle]) -> tuple[bool, bool, bool, float]:
            life = member[1]
            silent = life.code is None and (life.is_unreachable or self.kill_reason is not None)
            return (
                life.code in FINAL_EXIT_CODES, life.code not in (None, EXIT_OK, EXIT_PEER_LOST), silent,
                -life.last_beat)

        return max(enumerate(self._handles), key=guilt)
