"""What outlives this process by a few seconds, to see that its children do not (POSIX)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterable
from pathlib import Path

SCRIPT = """
trap '' HUP INT TERM
groups=
while read -r line; do groups=$line; done
alive() { for group in $groups; do kill -s 0 -- "-$group" 2>/dev/null && return; done; false; }
left=$1
while [ "$left" -gt 0 ] && alive; do sleep 1; left=$((left - 1)); done
for group in $groups; do kill -s KILL -- "-$group" 2>/dev/null; done
[ -z "$2" ] || rm -rf -- "$2"
"""
"""The last whole line of stdin names the process groups; the end of stdin is this process's own. A shell of a megabyte
does what no thread in the child can: end one that is stopped, stuck in native code or still importing, and all that it
started. It ignores the signals that a cluster's scheduler sends to every process of a job."""


class OrphanReaper:
    """Kills the process groups it knows, `grace_s` seconds after this process ended without a word.

    `leavings` is a folder that this process would have removed itself at its end.
    """

    def __init__(self, grace_s: int, cleanup_dir: Path | None = None) -> None:
        self._command = ["/bin/sh", "-c", SCRIPT, "guard", str(grace_s), str(cleanup_dir or "")]
        self._shell: subprocess.Popen[bytes] | None = None

    def watch(self, groups: Iterable[int]) -> None:
        """From now on these are the groups. A guard that was itself killed is replaced."""
        line = " ".join(str(group) for group in groups).encode() + b"\n"
        if not self._tell(line):
            self.stop()
            with contextlib.suppress(OSError):  # no process to be had: the next call tries again
                self._start()
                self._tell(line)

    def stop(self) -> None:
        """Let the guard go, and the groups live."""
        if self._shell is not None:
            self._shell.kill()
            self._shell.wait()
            assert self._shell.stdin
            self._shell.stdin.close()
            self._shell = None

    def _start(self) -> None:
        self._shell = subprocess.Popen(self._command, bufsize=0, cwd="/", stdin=subprocess.PIPE,
                                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        assert self._shell.stdin
        os.set_blocking(self._shell.stdin.fileno(), False)

    def _tell(self, line: bytes) -> bool:
        if self._shell is None:
            return False
        assert self._shell.stdin
        try:
            return os.write(self._shell.stdin.fileno(), line) == len(line)
        except OSError:  # it is dead, or does not read
            return False


def exited(process: subprocess.Popen[bytes]) -> bool:
    """Whether a child is dead, without reaping it where the system can tell."""
    if process.returncode is not None:
        return True
    if not hasattr(os, "waitid"):
        return process.poll() is not None
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a child that leads a group, and the group: before it is reaped, so that the number is nobody else's."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
