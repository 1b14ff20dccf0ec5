"""A child process that answers frames: deadlines, last words, and an end that leaves nothing behind (POSIX)."""

from __future__ import annotations

import codecs
import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from qfleet.core.errors import UserError
from qfleet.envs.frames import Frame, FrameDecoder, FrameError, encode

LAST_LINES = 50
TAIL_CHARACTERS = 1 << 16
PIPE_BYTES = 1 << 20
"""A pipe that holds a whole step of Atari frames: the child writes it without waiting for the reader."""

GLANCE_S = 0.2
"""How often a silent child is looked at: one that left a process behind holds its pipes open after its death."""

EXIT_GRACE_S = 1.0
"""A child that closed its pipe is exiting: this long it may take, so that its own exit code is reported."""

REAPER_SCRIPT = 'read _; sleep 1; kill -s KILL -- "-$0"'
"""Ends the child's process group a second after the pipe to this process broke. PR_SET_PDEATHSIG would be shorter, but
it spares the child's own children, strikes when the thread that started the child ends, and is Linux's alone."""


class ChildLost(Exception):
    """The child did not answer in time, ended, or answered nonsense."""

    def __init__(self, reason: str, grace_s: float = 0.0) -> None:
        super().__init__(reason)
        self.grace_s = grace_s


class PipeProcess:
    """One child and its pipes. `post` never waits; `read` waits with a deadline; `end` may be called at any time."""

    def __init__(self, command: Sequence[str]) -> None:
        if os.name != "posix":
            raise UserError("env.isolate=true needs Linux or macOS; set env.isolate=false")
        pipe = subprocess.PIPE
        # A session of its own: Ctrl-C at the terminal is for the trainer, and one kill reaches the whole group.
        self._process = subprocess.Popen(command, bufsize=0, stdin=pipe, stdout=pipe, stderr=pipe,
                                         start_new_session=True)
        self._reaper = subprocess.Popen(["/bin/sh", "-c", REAPER_SCRIPT, str(self._process.pid)], stdin=pipe,
                                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        assert self._process.stdin and self._process.stdout and self._process.stderr and self._reaper.stdin
        self._files = [self._process.stdin, self._process.stdout, self._process.stderr, self._reaper.stdin]
        self._in, self._out, self._err = (file.fileno() for file in self._files[:3])
        for fd in (self._in, self._out, self._err):
            os.set_blocking(fd, False)
        _widen(self._out)
        self._poll = select.poll()
        self._poll.register(self._out, select.POLLIN)
        self._poll.register(self._err, select.POLLIN)
        self._unsent = memoryview(b"")
        self._assembly = FrameDecoder()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._tail = ""
        self._ended = False

    def post(self, frame: Frame) -> None:
        """Write a frame as far as the pipe takes it; `read` writes the rest, and finds out if nobody reads it."""
        if self._ended:
            return
        self._unsent = memoryview(bytes(self._unsent) + encode(frame))
        self._flush()

    def read(self, timeout_s: float) -> Frame:
        """The next frame of the child's; ChildLost if none comes within `timeout_s`."""
        if self._ended:
            raise ChildLost("it was ended")
        deadline = time.monotonic() + timeout_s
        while True:
            left = deadline - time.monotonic()
            ready = dict(self._poll.poll(1000 * max(0.0, min(left, GLANCE_S))))
            if self._err in ready:
                self._drain_stderr()
            if self._in in ready:
                self._flush()
            if self._out in ready and (frame := self._receive()) is not None:
                return frame
            if left <= 0:
                raise ChildLost(f"it gave no answer within {timeout_s:g} s")
            if not ready and self._exited():
                raise ChildLost("it exited")

    def terminate(self, grace_s: float) -> None:
        """Close the pipes, which asks the child to leave; kill it and all it started after `grace_s`."""
        if self._ended:
            return
        self._ended = True
        for file in self._files[:2]:
            file.close()
        deadline = time.monotonic() + grace_s
        while not self._exited() and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(0.01, left))
            self._drain_stderr()  # a child that is blocked in a print could not leave
        self._reaper.kill()
        self._reaper.wait()
        # The group is killed before its leader is reaped: until then the number cannot belong to anybody else.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5.0)
        for _ in range(16):  # bounded: what fled from the group may go on writing
            self._drain_stderr()
        for file in self._files[2:]:
            file.close()

    def exit_report(self) -> str:
        """How an ended child ended, and the last lines that it wrote."""
        code = self._process.returncode
        lines = "\n".join(self._tail.splitlines()[-LAST_LINES:])
        return f"exit code {code}; " + (f"its last lines:\n{lines}" if lines else "it wrote nothing")

    def _flush(self) -> None:
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self._in, self._unsent):]
        except BlockingIOError:
            self._poll.register(self._in, select.POLLOUT)
            return
        except OSError:
            self._unsent = memoryview(b"")  # nobody reads any more: the reading side says why
        with contextlib.suppress(KeyError):
            self._poll.unregister(self._in)

    def _receive(self) -> Frame | None:
        """Read all that has come; the frame if it is whole."""
        try:
            while count := os.readv(self._out, [self._assembly.buffer]):
                if (frame := self._assembly.advance(count)) is not None:
                    return frame
            cut = " in the middle of an answer" if self._assembly.partial else ""
            raise ChildLost(f"it ended{cut}", EXIT_GRACE_S)
        except BlockingIOError:
            return None
        except FrameError as error:
            raise ChildLost(f"it sent nonsense: {error}") from None

    def _drain_stderr(self) -> None:
        """Keep and pass on what the child wrote to its stderr; its prints come here, too."""
        try:
            data = os.read(self._err, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            with contextlib.suppress(KeyError):
                self._poll.unregister(self._err)
            return
        text = self._decoder.decode(data)
        self._tail = (self._tail + text)[-TAIL_CHARACTERS:]
        with contextlib.suppress(OSError, ValueError, AttributeError):  # our own stderr may be closed, or None
            sys.stderr.write(text)

    def _exited(self) -> bool:
        """Whether the child is dead, without reaping it where the system can tell."""
        if not hasattr(os, "waitid"):
            return self._process.poll() is not None
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True


def _widen(fd: int) -> None:
    """Enlarge a pipe where the system and the user's quota allow it."""
    with contextlib.suppress(ImportError, AttributeError, OSError):
        import fcntl

        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
