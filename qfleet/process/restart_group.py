"""Processes that start, fail and restart together, supervised as one child."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from qfleet.process.handle import ProcessHandle
from qfleet.process.supervisor import EXIT_OK, FINAL_EXIT_CODES

EXIT_PEER_LOST = 3
"""Exit code of a process that cannot continue because another one of its group was lost."""

CULPRIT_S = 10.0
"""Seconds to wait for the failure of the lost process itself after another one reports it."""

StartMember = Callable[[Callable[[], bool]], ProcessHandle]
"""Starts a member; its argument tells whether the member's work may begin."""


class RestartGroup:
    """Implements `ProcessHandle` for several processes as one child.

    Their work begins when all processes are there; when one fails, all end; the group is done when all are.
    """

    def __init__(self, members: Sequence[StartMember], now: float) -> None:
        self.beats, self.first_beat, self.last_beat = False, now, now
        self.kill_reason: str | None = None
        self._handles: list[ProcessHandle] = []
        self._complete_at = now
        self._stop_requested = self._exited = self._killed = False
        self._cause: int | None = None
        self._failed_at: float | None = None
        try:
            for start in members:
                self._handles.append(start(lambda: not self.is_starting))
        except BaseException:
            for handle in self._handles:
                handle.kill()
                handle.reap()
            raise

    @property
    def pid(self) -> int:
        """Process id of the member that failed; of the first one while none has."""
        return self._handles[self._cause or 0].pid

    @property
    def process_groups(self) -> tuple[int, ...]:
        return tuple(group for handle in self._handles for group in handle.process_groups)

    @property
    def log_path(self) -> Path:
        """Log of the member that failed."""
        return self._handles[self._culprit()].log_path

    @property
    def is_starting(self) -> bool:
        return any(handle.is_starting for handle in self._handles)

    @property
    def is_unreachable(self) -> bool:
        return any(handle.is_unreachable for handle in self._handles)

    @property
    def code(self) -> int | None:
        return self._handles[self._culprit()].code if self.exited else None

    @property
    def exited(self) -> bool:
        if self._exited:
            return True
        codes = [handle.code for handle in self._handles if handle.exited]
        if (
            len(codes) < len(self._handles)
            and all(code in (EXIT_OK, EXIT_PEER_LOST) for code in codes)
            and not self._overdue(codes)
        ):
            return False
        number = self._end()
        culprit = self._handles[number]
        if culprit.code == EXIT_PEER_LOST:
            self.kill_reason = "lost the connection between its ranks"
        elif culprit.code is None or culprit.kill_reason is not None:
            self.kill_reason = f"lost its rank {number}, which {culprit.kill_reason or 'does not answer'}"
        return True

    def poll_heartbeat(self, now: float) -> None:
        """Update the beat times. While one process is starting, no heartbeat is late: the work has not begun.

        Members that have exited send none; the others may still be saving.
        """
        for handle in self._handles:
            handle.poll_heartbeat(now)
        if self.is_starting:
            self._complete_at = now
        running = [handle for handle in self._handles if handle.code is None] or self._handles
        self.beats = all(handle.beats for handle in running)
        self.first_beat = max(self._complete_at, *(handle.first_beat for handle in running))
        self.last_beat = min(map(self._last_beat, running))

    def _last_beat(self, handle: ProcessHandle) -> float:
        return max(self._complete_at, handle.last_beat)

    def request_stop(self) -> None:
        self._stop_requested = True
        for handle in self._handles:
            if not handle.exited:
                handle.request_stop()

    def kill(self, for_good: bool | None = None) -> None:
        if self._killed:
            return
        self._killed = True
        code = self._handles[self._end()].code
        if for_good is None:
            for_good = self._stop_requested or code in (EXIT_OK, *FINAL_EXIT_CODES)
        for handle in self._handles:
            handle.kill(for_good)

    def reap(self) -> int:
        code = [handle.reap() for handle in self._handles][self._culprit()]
        return -signal.SIGKILL if code == EXIT_PEER_LOST else code  # so that `kill_reason` is reported

    def log_tail(self) -> str:
        return self._handles[self._culprit()].log_tail()

    def _overdue(self, codes: Sequence[int | None]) -> bool:
        """True if a member was lost long ago and its own failure has not been seen."""
        if EXIT_PEER_LOST in codes and self._failed_at is None:
            self._failed_at = time.monotonic()
        return self._failed_at is not None and time.monotonic() - self._failed_at > CULPRIT_S

    def _end(self) -> int:
        """Decide which member caused the end, before all are killed, and return its index."""
        self._cause = self._culprit()
        self._exited = True
        return self._cause

    def _culprit(self) -> int:
        """Member that failed for a reason of its own; otherwise one that does not answer, or was silent for longest."""
        def blame(number: int) -> tuple[bool, bool, bool, bool, float]:
            handle = self._handles[number]
            return (
                handle.code in FINAL_EXIT_CODES, handle.code not in (None, EXIT_OK, EXIT_PEER_LOST),
                handle.code is None, handle.is_unreachable, -self._last_beat(handle))

        return max(range(len(self._handles)), key=blame) if self._cause is None else self._cause
