"""`ProcessHandle` of a supervised child that runs in a Ray actor.

    starting ──▶ the host answers ──▶ begin ──▶ running ──▶ the host reports how its job ended
       ▲                                           └──────▶ another process answers, or one without a job: it died
       └── no time limit: Ray starts a new process where resources are free, and perhaps none are yet

Ray restarts the actor (`max_restarts=-1`), possibly on another node; the supervisor decides whether and when it gets a
job again, as for local processes. Its index in the fleet belongs to its name.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable
from typing import Any

from qfleet.process.handle import ChildSpec, open_log, read_log_tail
from qfleet.process.supervisor import EXIT_OK, FINAL_EXIT_CODES
from qfleet.transport.ray_host import HostStatus

POLL_S = 0.25
"""Period of polling a host."""

GONE = "is gone: its process or its node died"


class RayActorSlot:
    """A Ray actor reserved for a child during the whole run, whatever happens to its process."""

    def __init__(self, create: Callable[[], Any], job: Callable[..., int], *args: Any) -> None:
        self._create, self.job, self.args = create, job, args
        self._handle: Any = None
        self._killed_process = ""

    @property
    def handle(self) -> Any:
        if self._handle is None:
            self._handle = self._create()
        return self._handle

    def start_job(self, number: int) -> Any:
        return self.handle.begin.remote(number, self.job, *self.args)

    def kill(self, process: str, for_good: bool) -> None:
        import ray

        self.replace(process)
        if self._handle is not None:
            with contextlib.suppress(Exception):  # the actor is dead already, or Ray is
                ray.kill(self._handle, no_restart=for_good)

    def replace(self, process: str) -> None:
        """Ignore a process, named by its token, that Ray replaces: it may answer once more."""
        self._killed_process = process

    def is_replaced(self, process: str) -> bool:
        return process == self._killed_process

    def discard_handle(self) -> None:
        """Forget an actor that Ray will not restart: the next instance gets a new one."""
        self._handle = None


class RayProcessHandle:
    """Implements `ProcessHandle`. `on_message` receives every new message of the host."""

    process_groups = ()

    def __init__(
        self, slot: RayActorSlot, child: ChildSpec, number: int, now: float, on_message: Callable[[str], object],
        may_start: Callable[[], bool] = lambda: True,
    ) -> None:
        self.beats, self.first_beat, self.last_beat = False, now, now
        self.kill_reason: str | None = None
        self.pid = 0
        self._slot, self._number, self._on_message = slot, number, on_message
        self._may_start, self.log_path = may_start, child.log_path
        with open_log(child, number) as log:
            self._log_start = log.tell()
        self._stop_requested = self._killed = self._no_answer = False
        self._process_token = ""
        self._beat_count = self._counted_beats = 0
        self._message = ""
        self._code: int | None = None
        self._call: Any = None
        self._not_before = 0.0

    @property
    def code(self) -> int | None:
        """Exit code of the job, or None while it runs."""
        return self._code

    @property
    def is_starting(self) -> bool:
        """True while there is no process: Ray waits for a node with free resources."""
        return not self._process_token

    @property
    def is_unreachable(self) -> bool:
        """True if the host does not answer at present."""
        return self.is_starting or self._no_answer

    @property
    def exited(self) -> bool:
        if self._killed:
            return True
        self._poll()
        return self._code is not None

    def poll_heartbeat(self, now: float) -> None:
        """Update the beat times; while there is no process, no heartbeat is late."""
        self._poll()
        if self.is_starting:
            self.first_beat = self.last_beat = now
        elif self._beat_count > self._counted_beats:  # may also come from a poll in `exited`
            self._counted_beats = self._beat_count
            self.first_beat = self.first_beat if self.beats else now
            self.last_beat, self.beats = now, True

    def request_stop(self) -> None:
        if self.is_starting and not self._stop_requested:
            self._code = -signal.SIGTERM
        self._stop_requested = True
        with contextlib.suppress(Exception):
            self._slot.handle.leave.remote()

    def kill(self, for_good: bool | None = None) -> None:
        """Kill the process; Ray starts another unless the child was asked to stop or its job ended for good."""
        if self._killed:
            return
        self._killed = True
        if for_good is None:
            for_good = self._stop_requested or self._code in (EXIT_OK, *FINAL_EXIT_CODES)
        if for_good or self.kill_reason != GONE:
            self._slot.kill(self._process_token, for_good)
        else:
            self._slot.replace(self._process_token)  # its replacement runs already, without a job

    def reap(self) -> int:
        return -signal.SIGKILL if self._code is None else self._code

    def log_tail(self) -> str:
        """The log, if this node can read it; otherwise the last message of the process."""
        found = read_log_tail(self.log_path, self._log_start)
        return found if self._message in found else f"{found}{self._message}"

    def _poll(self) -> None:
        """Process a received status and request the next one after a while; never blocks."""
        import ray

        if self._call is not None:
            if not ray.wait([self._call], timeout=0)[0]:
                return
            call, self._call = self._call, None
            self._not_before = time.monotonic() + POLL_S
            self._no_answer = True
            try:
                self._handle_status(ray.get(call))
                self._no_answer = False
            except ray.exceptions.ActorUnavailableError:
                pass  # between two processes, or a lost call: the next answer decides
            except ray.exceptions.ActorDiedError as error:
                self._slot.discard_handle()
                self._code, self.kill_reason, self._message = -signal.SIGKILL, GONE, str(error)
            except ray.exceptions.RayError:
                pass
        if self._code is None and time.monotonic() >= self._not_before:
            with contextlib.suppress(Exception):
                if self._stop_requested:  # the call may have been lost, and a repetition has no effect
                    self._slot.handle.leave.remote()
                self._call = self._slot.handle.look.remote()

    def _handle_status(self, status: HostStatus) -> None:
        if self._code is not None or self._slot.is_replaced(status.process_token):
            return
        if self._process_token and status.process_token != self._process_token:
            self._code, self.kill_reason = -signal.SIGKILL, GONE
            return
        self._process_token, self.pid = status.process_token, status.pid
        if status.number != self._number:
            if self._may_start():
                self._slot.start_job(self._number)
            return
        self._beat_count = status.beats
        if status.message != self._message:
            self._message = status.message
            self._on_message(status.message)
        self._code = status.code
