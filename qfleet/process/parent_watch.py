"""Detects the exit of the parent process, for processes that our supervisor did not start with a heartbeat pipe."""

from __future__ import annotations

import faulthandler
import os
import threading
from collections.abc import Callable

POLL_PERIOD_S = 1.0
GRACE_S = 60.0
"""Seconds between the callback and the forced exit of the process."""


def on_parent_exit(leave: Callable[[], object], grace_s: float = GRACE_S) -> Callable[[], None]:
    """Call `leave` from a thread when the parent has died. Returns a function that ends the watch."""
    parent, over = os.getppid(), threading.Event()

    def watch() -> None:
        while not over.wait(POLL_PERIOD_S):
            if os.getppid() != parent:
                faulthandler.dump_traceback_later(grace_s, exit=True)
                leave()
                return

    threading.Thread(target=watch, name="orphans", daemon=True).start()
    return over.set
