"""Kills the child processes of a process that died without ending them (POSIX)."""

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
"""Shell script that waits for the end of stdin, which means that this process is gone, and kills the process groups
named by the last complete line. Unlike a thread in the child, it can end a child that is stopped, stuck in native
code or still importing, with everything that the child started. It takes about a megabyte, and ignores the signals
that a cluster's scheduler sends to every process of a job.
"""


class OrphanReaper:
    """Kills the watched process groups `grace_s` seconds after this process ended without calling `stop`.

    `cleanup_dir` is a folder that this process would have removed at its end; the reaper removes it instead.
    """

    def __init__(self, grace_s: int, cleanup_dir: Path | None = None) -> None:
        self._command = ["/bin/sh", "-c", SCRIPT, "guard", str(grace_s), str(cleanup_dir or "")]
        self._shell: subprocess.Popen[bytes] | None = None

    def watch(self, groups: Iterable[int]) -> None:
        """Replace the watched groups. If the reaper's own process was killed, start another."""
        line = " ".join(str(group) for group in groups).encode() + b"\n"
        if not self._send(line):
            self.stop()
            with contextlib.suppress(OSError):  # no process could be started: the next call tries again
                self._start()
                self._send(line)

    def stop(self) -> None:
        """End the reaper without killing the groups."""
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

    def _send(self, line: bytes) -> bool:
        if self._shell is None:
            return False
        assert self._shell.stdin
        try:
            return os.write(self._shell.stdin.fileno(), line) == len(line)
        except OSError:  # the shell is dead, or does not read
            return False


def exited(process: subprocess.Popen[bytes]) -> bool:
    """True if a child has exited. Does not reap it where the system has `waitid`."""
    return exit_status(process) is not None


def exit_status(process: subprocess.Popen[bytes]) -> int | None:
    """Exit status of a child (-n: signal n), None while it runs. Does not reap it where the system has `waitid`."""
    if process.returncode is not None or not hasattr(os, "waitid"):
        return process.poll()
    try:
        found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # reaped by someone else: the status is lost, and `poll` returns 0
        return process.poll()
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a child that leads a process group, and the group, before it is reaped and its id can be reused."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
