"""Supervised child processes: `ChildSpec` describes one, `ProcessHandle` controls one running instance of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from qfleet.process.heartbeat import HeartbeatReceiver
from qfleet.process.reaper import exit_status, exited, kill_group

LOG_BYTES = 1 << 18
"""Bytes at the end of a log that are searched for a traceback: one further back was survived and explains nothing."""


@dataclass(frozen=True)
class ChildSpec:
    """Specification of a supervised process. `env` is added to the environment; output is appended to `log_path`.

    `max_restarts` limits all restarts of this child, however healthy it was between them; None applies the supervisor's
    limit of restarts in a row. `memory_hint` names the config keys to lower if the process is OOM-killed.
    """

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    log_path: Path
    max_restarts: int | None = None
    memory_hint: str = "env.lanes or actors"
    silence_s: float | None = None  # heartbeat timeout of this child; None = the supervisor's


def child_environment() -> dict[str, str]:
    """Environment of a new Python child: it imports modules from the same paths, including a user script's folder."""
    return {"PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


class ProcessHandle(Protocol):
    """One running instance of a child, local or remote, from start to exit. Times are on the supervisor's clock.

    Attributes:
        beats: True after the first heartbeat.
        first_beat: Time of the first heartbeat, or of the start.
        last_beat: Time of the newest heartbeat, or of the start.
        kill_reason: Why the process was lost, if the handle knows.
    """

    beats: bool
    first_beat: float
    last_beat: float
    kill_reason: str | None

    @property
    def pid(self) -> int:
        """Process id."""

    @property
    def process_groups(self) -> tuple[int, ...]:
        """Process groups on this host."""

    @property
    def log_path(self) -> Path:
        """Log file."""

    @property
    def is_starting(self) -> bool:
        """True while there is no process yet."""

    @property
    def is_unreachable(self) -> bool:
        """True if the process does not answer at present, or there is none."""

    @property
    def exited(self) -> bool:
        """True if the process has exited."""

    @property
    def code(self) -> int | None:
        """Exit status (-n: signal n), None while it runs."""

    def poll_heartbeat(self, now: float) -> None:
        """Read the heartbeats that have arrived.

        Args:
            now: Time of the supervisor's clock, seconds.
        """

    def request_stop(self) -> None:
        """Ask the process to save and exit."""

    def kill(self, for_good: bool | None = None) -> None:
        """Kill the process.

        Args:
            for_good: No other instance will follow; None if the handle has to find out.
        """

    def reap(self) -> int:
        """Release an exited process.

        Returns:
            Its exit status.
        """

    def log_tail(self) -> str:
        """Read the end of the log.

        Returns:
            Last lines of the log of this instance.
        """


class LocalProcess:
    """`ProcessHandle` of a process on this host."""

    is_starting = is_unreachable = False

    def __init__(self, child: ChildSpec, number: int, now: float) -> None:
        self.beats, self.first_beat, self.last_beat = False, now, now
        self.kill_reason: str | None = None
        self.log_path = child.log_path
        self._heartbeat = HeartbeatReceiver()
        try:
            with open_log(child, number) as log:
                self._log_start = log.tell()
                # A separate session: Ctrl-C at the terminal does not reach it, and one kill reaches the whole group.
                self.process = subprocess.Popen(
                    child.argv, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                    env={**os.environ, **child.env, **self._heartbeat.environment}, pass_fds=self._heartbeat.child_fds)
        except BaseException:
            self._heartbeat.close()
            raise
        self._heartbeat.close_child_fds()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def process_groups(self) -> tuple[int, ...]:
        return (self.pid,)

    @property
    def exited(self) -> bool:
        return exited(self.process)

    @property
    def code(self) -> int | None:
        return exit_status(self.process)

    def kill(self, for_good: bool | None = None) -> None:
        """Kill the process and everything it started."""
        kill_group(self.process)

    def poll_heartbeat(self, now: float) -> None:
        """Read heartbeats of the child and update the beat times."""
        if self._heartbeat.received():
            self.first_beat = self.first_beat if self.beats else now
            self.last_beat, self.beats = now, True

    def request_stop(self) -> None:
        """Send SIGTERM to the child. Processes that it started are the child's to end."""
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()

    def reap(self) -> int:
        """Reap a child that was killed or exited; return its exit status."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=5.0)
        self._heartbeat.close()
        return -signal.SIGKILL if self.process.returncode is None else self.process.returncode

    def log_tail(self) -> str:
        """Output of this instance, at most the last `LOG_BYTES`."""
        return read_log_tail(self.log_path, self._log_start)


def open_log(child: ChildSpec, number: int) -> IO[bytes]:
    """Open the log of a child for appending, and write a line that marks start `number`."""
    child.log_path.parent.mkdir(parents=True, exist_ok=True)
    log = open(child.log_path, "ab")  # noqa: SIM115 (the caller closes it)
    log.write(f"=== {child.name}: start {number} ===\n".encode())
    log.flush()
    return log


def read_log_tail(path: Path, start: int) -> str:
    """Text of a log from byte `start`, at most the last `LOG_BYTES`."""
    try:
        with open(path, "rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(start, end - LOG_BYTES))
            return log.read().decode("utf-8", "replace")
    except OSError as error:
        return f"(the log cannot be read: {error})"
