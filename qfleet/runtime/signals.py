"""Signals end a run in order: the first one stops it at a whole step with a checkpoint, a second SIGINT at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

REASONS = {"SIGINT": "interrupted", "SIGTERM": "preempted", "SIGUSR1": "preempted"}


class Told(Protocol):
    """Whoever can be asked to stop, and why."""

    reason: str | None


@contextmanager
def obeyed(stop: Told, hurry: bool = True) -> Iterator[None]:
    """While inside, signals become reasons to stop. Only the main thread receives any; elsewhere nothing changes.

    Without `hurry` a second SIGINT changes nothing either: somebody else decides when there is no more time.
    """
    def handle(number: int, frame: FrameType | None) -> None:
        reason = REASONS[signal.Signals(number).name]
        if stop.reason == "interrupted" and reason == "interrupted":
            if hurry:
                raise KeyboardInterrupt
            return
        stop.reason = reason

    with _handled(handle):
        yield


@contextmanager
def heeded(leave: Callable[[], object]) -> Iterator[None]:
    """While inside, every such signal asks to leave; for a process that has nothing of its own to save.

    As with `obeyed`, that is so in the main thread only.
    """
    with _handled(lambda number, frame: leave()):
        yield


@contextmanager
def _handled(handle: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [getattr(signal, name) for name in REASONS if hasattr(signal, name)]
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
