"""Signal handling: the first signal stops a run at a whole step with a checkpoint, a second SIGINT stops it at once."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

REASONS = {"SIGINT": "interrupted", "SIGTERM": "preempted", "SIGUSR1": "preempted", "SIGHUP": "preempted"}

EXIT_CODES = {"interrupted": 130, "preempted": 75}
"""Exit code of the command line by the reason that a signal sets."""


class Stoppable(Protocol):
    """Object that stops when `reason` is set."""

    reason: str | None


class SignalledStop:
    """What a signal sets: the reason to stop."""

    reason: str | None = None


class LateSignalHandler:
    """Signal handler for the time before and after a run, in a process that exits with it.

    Before a run has handled a signal, a signal has its default effect. Afterwards it has none: the exit code of the run
    stands, also while the interpreter shuts down. Only a second late SIGINT ends the process at once.
    """

    def __init__(self) -> None:
        self.stopping = False
        self._impatient = False

    def begin_stop(self) -> None:
        """Note that a run has handled a signal."""
        self.stopping = True

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self.stopping and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.stopping:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        elif number == signal.SIGINT:
            if self._impatient:
                os._exit(130)
            self._impatient = True


LATE_SIGNALS = LateSignalHandler()


def keep_exit_code() -> None:
    """Install `LATE_SIGNALS`, so that signals after the one that ended the run do not change the exit code."""
    for number in _numbers():
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, LATE_SIGNALS)


def ignore_late() -> None:
    """Ignore further signals. The last call before the interpreter exits and restores the default, fatal handlers."""
    if LATE_SIGNALS.stopping:
        for number in _numbers():
            signal.signal(number, signal.SIG_IGN)


@contextmanager
def stop_on_signal(stop: Stoppable, second_sigint_raises: bool = True) -> Iterator[None]:
    """While inside, signals set `stop.reason`. Has an effect in the main thread only, which receives all signals.

    Without `second_sigint_raises` a second SIGINT has no effect: the parent process decides when to kill.
    """
    def handle(number: int, frame: FrameType | None) -> None:
        LATE_SIGNALS.begin_stop()
        name = signal.Signals(number).name
        if name == "SIGHUP":
            drop_closed_terminal()
        if stop.reason == "interrupted" and REASONS[name] == "interrupted":
            if second_sigint_raises:
                raise KeyboardInterrupt
            return
        if stop.reason not in REASONS.values():  # the first signal decides the exit code
            stop.reason = REASONS[name]

    with _handled(handle):
        yield


@contextmanager
def exit_on_signal(leave: Callable[[], object]) -> Iterator[None]:
    """While inside, every handled signal calls `leave`; for a process without state to save.

    Like `stop_on_signal`, it has an effect in the main thread only.
    """
    with _handled(lambda number, frame: leave()):
        yield


@contextmanager
def sighup_ignored() -> Iterator[None]:
    """Processes started inside ignore SIGHUP.

    A terminal that closes sends SIGHUP to them as well, but this process needs them to save, and ends them itself.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGHUP"):
        yield
        return
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def drop_closed_terminal() -> None:
    """Redirect stdout and stderr to /dev/null if their terminal was closed and every write would fail."""
    with contextlib.suppress(ImportError):
        import termios

        for fd in (1, 2):
            try:
                termios.tcgetattr(fd)
            except termios.error as error:
                if error.args[0] == errno.EIO:
                    null = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(null, fd)
                    os.close(null)


@contextmanager
def _handled(handle: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handle) for number in _numbers()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _numbers() -> list[int]:
    """Handled signals of this system. SIGHUP stays ignored where `nohup` has set that."""
    found = [getattr(signal, name) for name in REASONS if hasattr(signal, name)]
    hangup = getattr(signal, "SIGHUP", None)
    return [number for number in found if number != hangup or signal.getsignal(number) != signal.SIG_IGN]
