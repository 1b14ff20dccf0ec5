"""Children that a supervisor keeps alive, and a life of such a child: a process of this host, or what acts like one."""

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
from qfleet.process.reaper import exited, kill_group

LOG_BYTES = 1 << 18
"""So much of a log's end is searched for a traceback: an old one, long survived, explains nothing."""


@dataclass(frozen=True)
class ChildSpec:
    """A process to be kept alive. `env` is added to this process's own; what it writes is appended to `log_path`.

    `max_restarts` of its own are all that it gets, however healthy it was between them; None: as many in a row as the
    others. `appetite` names the settings that ask for its memory.
    """

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    log_path: Path
    max_restarts: int | None = None
    memory_hint: str = "env.lanes or actors"
    silence_s: float | None = None  # None: as long as the others may be silent


def child_environment() -> dict[str, str]:
    """For a fresh interpreter of ours: it finds modules where this process does, beside a user's script, too."""
    return {"PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


class ProcessHandle(Protocol):
    """One life of a child's, from its start to its end, wherever it is lived. Times are the supervisor's."""

    beats: bool
    first_beat: float
    last_beat: float
    kill_reason: str | None  # why it was killed, if we did it

    @property
    def pid(self) -> int: ...
    @property
    def exited(self) -> bool: ...
    def poll_heartbeat(self, now: float) -> None: ...
    def request_stop(self) -> None: ...
    def kill(self) -> None: ...
    def reap(self) -> int: ...
    def log_tail(self) -> str: ...


class LocalProcess:
    """A life as a process of this host."""

    def __init__(self, child: ChildSpec, number: int, now: float) -> None:
        self.beats, self.first_beat, self.last_beat = False, now, now
        self.kill_reason: str | None = None
        self._log_path = child.log_path
        self._heartbeat = HeartbeatReceiver()
        try:
            with open_log(child, number) as log:
                self._log_start = log.tell()
                # A session of its own: Ctrl-C at the terminal is for us, and one kill reaches the whole group.
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
    def exited(self) -> bool:
        return exited(self.process)

    def kill(self) -> None:
        """End it and all that it started."""
        kill_group(self.process)

    def poll_heartbeat(self, now: float) -> None:
        """Take note of the child's beats."""
        if self._heartbeat.received():
            self.first_beat = self.first_beat if self.beats else now
            self.last_beat, self.beats = now, True

    def request_stop(self) -> None:
        """Ask the child to leave. What it started is its own to end."""
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()

    def reap(self) -> int:
        """Reap a child that was killed or ended; its exit status."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=5.0)
        self._heartbeat.close()
        return -signal.SIGKILL if self.process.returncode is None else self.process.returncode

    def log_tail(self) -> str:
        """What the process wrote, the last of it if that is much."""
        return read_log_tail(self._log_path, self._log_start)


def open_log(child: ChildSpec, number: int) -> IO[bytes]:
    """The log of a child, with a line in it that says that another life begins."""
    child.log_path.parent.mkdir(parents=True, exist_ok=True)
    log = open(child.log_path, "ab")  # noqa: SIM115 (for the caller, to be closed there)
    log.write(f"=== {child.name}: start {number} ===\n".encode())
    log.flush()
    return log


def read_log_tail(path: Path, start: int) -> str:
    """What a log holds from some place on, the last of it if that is much."""
    try:
        with open(path, "rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(start, end - LOG_BYTES))
            return log.read().decode("utf-8", "replace")
    except OSError as error:
        return f"(its log cannot be read: {error})"
