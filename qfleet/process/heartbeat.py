"""Heartbeat pipes between a child process and its parent (POSIX).

    HeartbeatReceiver, in the parent              HeartbeatSender, in the child
      reads, never blocks         ◀── beats ──      one byte per period, written by the main loop
      never writes                ──  alive ──▶     end of file means that the parent is gone

Two pipes, named by an environment variable. The kernel closes the parent's ends however the parent ends.
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
    """Connection of a process to its supervisor: sends heartbeats, and calls back when the process should exit."""

    def beat(self) -> None: ...
    def on_orphan(self, callback: Callable[[], object]) -> None: ...


class HeartbeatSender:
    """The child's end of the pipes."""

    def __init__(self, beats: int, alive: int) -> None:
        self._beats, self._alive = beats, alive
        self._next = 0.0
        os.set_blocking(beats, False)
        for fd in (beats, alive):
            os.set_inheritable(fd, False)

    @classmethod
    def from_env(cls) -> HeartbeatSender | None:
        """Take the pipes from the environment; None if there are none.

        The variable is removed, so that children of this process do not inherit it.
        """
        fds = [int(fd) for fd in os.environ.pop(VARIABLE, "").split(",") if fd]
        try:
            # A variable whose descriptors are not pipes was meant for an ancestor that did not read it.
            if len(fds) == 2 and all(stat.S_ISFIFO(os.fstat(fd).st_mode) for fd in fds):
                return cls(*fds)
        except OSError:
            pass
        return None

    def beat(self) -> None:
        """Send a heartbeat if `BEAT_PERIOD_S` has passed since the last one. Never blocks and never fails."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + BEAT_PERIOD_S
        with contextlib.suppress(OSError):  # the pipe is full (unread for hours) or broken
            os.write(self._beats, b".")

    def on_orphan(self, callback: Callable[[], object], grace_s: float = ORPHAN_GRACE_S) -> None:
        """Call `callback` from a thread when the parent is gone, and end the process `grace_s` later.

        The callback asks the main thread to exit in order. The forced exit does not need the GIL, so a main thread
        that holds it cannot prevent it; the stacks are written to stderr. (PR_SET_PDEATHSIG would not let the callback
        finish, and fires when merely the parent's thread ends. Its one advantage, that it ends a process which is
        stopped or stuck while it holds the GIL, is provided by the supervisor's `OrphanReaper`.)
        """
        threading.Thread(target=self._watch, args=(callback, grace_s), name="heartbeat", daemon=True).start()

    def _watch(self, callback: Callable[[], object], grace_s: float) -> None:
        while os.read(self._alive, 1):
            pass
        faulthandler.dump_traceback_later(grace_s, exit=True, file=2)
        with contextlib.suppress(Exception):  # stderr may be closed; the callback must run all the same
            print(f"the parent process is gone; this process exits within {grace_s:g} s",
                  file=sys.stderr, flush=True)
        try:
            callback()
        except Exception:
            traceback.print_exc()


def heartbeat_thread(
    heartbeat: Heartbeat | None, limit_s: float, alive: Callable[[], bool] = lambda: True
) -> threading.Event:
    """Send heartbeats from a thread during long operations, for at most `limit_s` and only while `alive`.

    Set the returned event to stop it.
    """
    over, deadline = threading.Event(), time.monotonic() + limit_s

    def beat() -> None:
        while not over.wait(0.5) and time.monotonic() < deadline:
            if heartbeat is not None and alive():
                heartbeat.beat()

    threading.Thread(target=beat, name="beat", daemon=True).start()
    return over


class HeartbeatReceiver:
    """The parent's end of the pipes.

    Start the child with `child_fds` and `environment`, then call `close_child_fds`; at the end call `close`.
    """

    def __init__(self) -> None:
        self._beats, beats = os.pipe()
        try:
            alive, self._alive = os.pipe()
        except OSError:
            os.close(self._beats)
            os.close(beats)
            raise
        os.set_blocking(self._beats, False)
        self.child_fds: tuple[int, ...] = (beats, alive)
        self.environment = {VARIABLE: f"{beats},{alive}"}

    def close_child_fds(self) -> None:
        """Close the child's ends in this process: an open copy would hide the child's exit."""
        for fd in self.child_fds:
            os.close(fd)
        self.child_fds = ()

    def received(self) -> bool:
        """True if the child sent a heartbeat since the last call."""
        try:
            return bool(os.read(self._beats, 1 << 16))
        except BlockingIOError:
            return False

    def close(self) -> None:
        self.close_child_fds()
        os.close(self._beats)
        os.close(self._alive)
