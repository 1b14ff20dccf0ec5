"""The thin line between a process and the one that started it: signs of life up, the news of a death down (POSIX).

    Leash, in the parent                          Tether, in the child
      reads, never waits          ◀── beats ──      a byte now and then, from the loop that must not hang
      writes nothing, ever        ──  life  ──▶     the end of the pipe says that the parent is gone

Two pipes and an environment variable that names them. The kernel closes the parent's ends whatever becomes of it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Protocol

VARIABLE = "QFLEET_TETHER"
BEAT_PERIOD_S = 0.2
ORPHAN_GRACE_S = 8.0


class Heartbeat(Protocol):
    """What a process has of whoever watches it: it shows life, and hears when to leave."""

    def beat(self) -> None: ...
    def on_orphan(self, callback: Callable[[], object]) -> None: ...


class HeartbeatSender:
    """The child's end."""

    def __init__(self, beats: int, life: int) -> None:
        self._beats, self._life = beats, life
        self._next = 0.0
        os.set_blocking(beats, False)
        for fd in (beats, life):
            os.set_inheritable(fd, False)

    @classmethod
    def from_env(cls) -> HeartbeatSender | None:
        """The line that the parent left in the environment, taken from there: it is not for children of ours."""
        fds = [int(fd) for fd in os.environ.pop(VARIABLE, "").split(",") if fd]
        try:
            # A variable without its pipes was meant for an ancestor that did not take it.
            if len(fds) == 2 and all(stat.S_ISFIFO(os.fstat(fd).st_mode) for fd in fds):
                return cls(*fds)
        except OSError:
            pass
        return None

    def beat(self) -> None:
        """Say that the caller is alive. Call it as often as you like: it never waits and never fails."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + BEAT_PERIOD_S
        with contextlib.suppress(OSError):  # the pipe is full: nobody looked for hours; or broken: nobody will
            os.write(self._beats, b".")

    def on_orphan(self, callback: Callable[[], object], grace_s: float = ORPHAN_GRACE_S) -> None:
        """When the parent is gone, call `callback` from a thread of its own, and end the process `grace_s` later.

        The callback asks the main thread to leave in order. The hard end does not need Python's lock, so a main thread
        that took it away meanwhile cannot prevent it; the stacks go to stderr. (PR_SET_PDEATHSIG would not let the
        callback finish, and strikes when merely the parent's thread ends. What it would add, the end of a process that
        is stopped or stuck with the lock in its hands, is the work of the supervisor's `Guard`.)
        """
        threading.Thread(target=self._watch, args=(callback, grace_s), name="tether", daemon=True).start()

    def _watch(self, callback: Callable[[], object], grace_s: float) -> None:
        while os.read(self._life, 1):
            pass
        faulthandler.dump_traceback_later(grace_s, exit=True, file=2)
        with contextlib.suppress(Exception):  # whatever became of stderr, the callback is what counts
            print(f"the process that started this one is gone; the end comes within {grace_s:g} s",
                  file=sys.stderr, flush=True)
        try:
            callback()
        except Exception:
            traceback.print_exc()


class HeartbeatReceiver:
    """The parent's end. Give `child_fds` and `environment` to the child, then `passed`; in the end `close`."""

    def __init__(self) -> None:
        self._beats, beats = os.pipe()
        try:
            life, self._life = os.pipe()
        except OSError:
            os.close(self._beats)
            os.close(beats)
            raise
        os.set_blocking(self._beats, False)
        self.child_fds: tuple[int, ...] = (beats, life)
        self.environment = {VARIABLE: f"{beats},{life}"}

    def close_child_fds(self) -> None:
        """Close the child's ends here, where a second copy would hide its death."""
        for fd in self.child_fds:
            os.close(fd)
        self.child_fds = ()

    def received(self) -> bool:
        """Whether the child gave a sign of life since the last call."""
        try:
            return bool(os.read(self._beats, 1 << 16))
        except BlockingIOError:
            return False

    def close(self) -> None:
        self.close_child_fds()
        os.close(self._beats)
        os.close(self._life)
