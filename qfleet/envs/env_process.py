"""Child process that exchanges frames over pipes, with deadlines, an exit report and full cleanup (POSIX)."""

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
from qfleet.envs.pipe_frames import Frame, FrameDecoder, FrameError, encode

LAST_LINES = 50
TAIL_CHARACTERS = 1 << 16
PIPE_BYTES = 1 << 20
"""Pipe size that holds a whole step of Atari frames: the child writes it without waiting for the reader."""

POLL_S = 0.2
"""Interval between checks of a silent child: the pipes of a dead child stay open if it left a process behind."""

EXIT_GRACE_S = 1.0
"""Time for a child that closed its pipe to exit, so that its own exit code is reported."""

REAPER_SCRIPT = 'read _; sleep 1; kill -s KILL -- "-$0"'
"""Kills the child's process group a second after the pipe to this process breaks. PR_SET_PDEATHSIG would be simpler,
but it does not reach the child's own children, fires when the thread that started the child ends, and is Linux-only.
"""


class ChildLost(Exception):
    """The child did not answer in time, exited, or sent an invalid answer."""

    def __init__(self, reason: str, grace_s: float = 0.0) -> None:
        super().__init__(reason)
        self.grace_s = grace_s


class PipeProcess:
    """One child process and its pipes.

    `post` never blocks; `read` blocks up to a deadline; `terminate` may be called at any time.
    """

    def __init__(self, command: Sequence[str]) -> None:
        if os.name != "posix":
            raise UserError("env.isolate=true needs Linux or macOS; set env.isolate=false")
        pipe = subprocess.PIPE
        # A new session: Ctrl-C at the terminal reaches only the trainer, and one killpg reaches the whole group.
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
        self._frame_decoder = FrameDecoder()
        self._text_decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._tail = ""
        self._ended = False

    def post(self, frame: Frame) -> None:
        """Write a frame as far as the pipe accepts it; `read` writes the rest and detects a closed pipe."""
        if self._ended:
            return
        self._unsent = memoryview(bytes(self._unsent) + encode(frame))
        self._flush()

    def read(self, timeout_s: float) -> Frame:
        """Next frame from the child; raises ChildLost if none arrives within `timeout_s`."""
        if self._ended:
            raise ChildLost("it was terminated")
        deadline = time.monotonic() + timeout_s
        while True:
            left = deadline - time.monotonic()
            ready = dict(self._poll.poll(1000 * max(0.0, min(left, POLL_S))))
            if self._err in ready:
                self._drain_stderr()
            if self._in in ready:
                self._flush()
            if self._out in ready and (frame := self._receive()) is not None:
                return frame
            if left <= 0:
                raise ChildLost(f"it did not answer within {timeout_s:g} s")
            if not ready and self._exited():
                raise ChildLost("it exited")

    def terminate(self, grace_s: float) -> None:
        """Close the pipes, which asks the child to exit; after `grace_s` kill it and its descendants."""
        if self._ended:
            return
        self._ended = True
        for file in self._files[:2]:
            file.close()
        deadline = time.monotonic() + grace_s
        while not self._exited() and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(0.01, left))
            self._drain_stderr()  # a child blocked in a print could not exit
        self._reaper.kill()
        self._reaper.wait()
        # The group is killed before its leader is reaped: until then its id cannot be reused.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5.0)
        for _ in range(16):  # bounded: a process that left the group may keep writing
            self._drain_stderr()
        for file in self._files[2:]:
            file.close()

    def exit_report(self) -> str:
        """Exit code of a terminated child and the last lines it wrote."""
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
            self._unsent = memoryview(b"")  # the pipe is closed; reading will report the reason
        with contextlib.suppress(KeyError):
            self._poll.unregister(self._in)

    def _receive(self) -> Frame | None:
        """Read all available bytes; returns the frame if it is complete."""
        try:
            while count := os.readv(self._out, [self._frame_decoder.buffer]):
                if (frame := self._frame_decoder.advance(count)) is not None:
                    return frame
            position = " in the middle of an answer" if self._frame_decoder.partial else ""
            raise ChildLost(f"it ended{position}", EXIT_GRACE_S)
        except BlockingIOError:
            return None
        except FrameError as error:
            raise ChildLost(f"it sent invalid data: {error}") from None

    def _drain_stderr(self) -> None:
        """Keep and forward the child's stderr, which includes its prints."""
        try:
            data = os.read(self._err, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            with contextlib.suppress(KeyError):
                self._poll.unregister(self._err)
            return
        text = self._text_decoder.decode(data)
        self._tail = (self._tail + text)[-TAIL_CHARACTERS:]
        with contextlib.suppress(OSError, ValueError, AttributeError):  # this process's stderr may be closed or None
            sys.stderr.write(text)

    def _exited(self) -> bool:
        """True if the child has exited; does not reap it on systems with waitid."""
        if not hasattr(os, "waitid"):
            return self._process.poll() is not None
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True


def _widen(fd: int) -> None:
    """Enlarge a pipe if the system and the user's quota allow it."""
    with contextlib.suppress(ImportError, AttributeError, OSError):
        import fcntl

        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
