"""Signals end a run in order: the first one stops it at a whole step with a checkpoint, a second SIGINT at once."""

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


class Stoppable(Protocol):
    """Whoever can be asked to stop, and why."""

    reason: str | None


class LateSignalHandler:
    """Handler for the time before and after a run, in a process that ends with it.

    Before a run has obeyed a signal, another one does what it does to any process. Afterwards it changes nothing: the
    exit code of the run stands, also while the interpreter ends. Only a second late SIGINT ends the process at once.
    """

    def __init__(self) -> None:
        self.stopping = False
        self._impatient = False

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
    """From now on, signals after the one that ended this process's run do not change its exit code."""
    for number in _numbers():
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, LATE_SIGNALS)


def ignore_late() -> None:
    """The last call before the interpreter ends, which would give signals back to the system, each one deadly."""
    if LATE_SIGNALS.stopping:
        for number in _numbers():
            signal.signal(number, signal.SIG_IGN)


@contextmanager
def stop_on_signal(stop: Stoppable, second_sigint_raises: bool = True) -> Iterator[None]:
    """While inside, signals become reasons to stop. Only the main thread receives any; elsewhere nothing changes.

    Without `hurry` a second SIGINT changes nothing either: somebody else decides when there is no more time.
    """
    def handle(number: int, frame: FrameType | None) -> None:
        LATE_SIGNALS.stopping = True
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
    """While inside, every such signal asks to leave; for a process that has nothing of its own to save.

    As with `obeyed`, that is so in the main thread only.
    """
    with _handled(lambda number, frame: leave()):
        yield


@contextmanager
def sighup_ignored() -> Iterator[None]:
    """Processes that are started inside ignore SIGHUP: a terminal that closes sends it to them, too, and this process
    needs them to save. It ends them itself."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGHUP"):
        yield
        return
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def drop_closed_terminal() -> None:
    """Write to nowhere instead of a terminal that was closed, where every write fails, also an environment's."""
    with contextlib.suppress(ImportError):
        import termios

        for fd in (1, 2):
            try:
                termios.tcgetattr(fd)
            except termios.error as error:
                if error.args[0] == errno.EIO:
                    nowhere = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(nowhere, fd)
                    os.close(nowhere)


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
    """Those that this system has. A process that `nohup` has made ignore SIGHUP goes on ignoring it."""
    found = [getattr(signal, name) for name in REASONS if hasattr(signal, name)]
    hangup = getattr(signal, "SIGHUP", None)
    return [number for number in found if number != hangup or signal.getsignal(number) != signal.SIG_IGN]
