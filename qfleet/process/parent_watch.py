"""A process whose starter is gone says so. For those started by others than our supervisor, who gives a tether."""

from __future__ import annotations

import faulthandler
import os
import threading
from collections.abc import Callable

LOOK_S = 1.0
GRACE_S = 60.0
"""After that the process is ended, whatever it is doing."""


def on_parent_exit(leave: Callable[[], object], grace_s: float = GRACE_S) -> Callable[[], None]:
    """Call `leave` from a thread when the parent has died; what is returned ends the watch."""
    parent, over = os.getppid(), threading.Event()

    def watch() -> None:
        while not over.wait(LOOK_S):
            if os.getppid() != parent:
                faulthandler.dump_traceback_later(grace_s, exit=True)
                leave()
                return

    threading.Thread(target=watch, name="orphans", daemon=True).start()
    return over.set
