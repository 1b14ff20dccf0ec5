"""Signals end a run in order: the first one stops it at a whole step with a checkpoint, a second SIGINT at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from qfleet.runtime.plan import Stop

REASONS = {"SIGINT": "interrupted", "SIGTERM": "preempted", "SIGUSR1": "preempted"}


@contextmanager
def obeyed(stop: Stop) -> Iterator[None]:
    """While inside, signals become reasons to stop. Only the main thread receives any; elsewhere nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        reason = REASONS[signal.Signals(number).name]
        if stop.reason == "interrupted" and reason == "interrupted":
            raise KeyboardInterrupt
        stop.reason = reason

    numbers = [getattr(signal, name) for name in REASONS if hasattr(signal, name)]
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
