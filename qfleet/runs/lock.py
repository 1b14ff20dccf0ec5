"""Identity of the process that owns a run's lock or a partly written checkpoint, and a test whether it is alive."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

from qfleet.runs.safe_open import open_no_follow

MOST_BYTES = 1000


@dataclass(frozen=True)
class LockOwner:
    """Unique identity of a process: a pid may be reused, but not with the same start time on the same boot."""

    host: str
    pid: int
    start: str
    """Boot id and clock tick of the process start; empty if the system does not provide them."""

    @staticmethod
    def current() -> LockOwner:
        return LockOwner(platform.node(), os.getpid(), _start_time(os.getpid()) or "")

    @staticmethod
    def parse(text: str) -> LockOwner | None:
        """Parse the text of `str(owner)`; None for any other text."""
        pid, _, rest = text.strip().partition(".")
        start, separator, host = rest.partition(".")
        if not (separator and pid.isascii() and pid.isdigit()):
            return None
        return LockOwner(host, int(pid), start)

    @staticmethod
    def read(lock: Path) -> LockOwner | None:
        """Return the owner of a lock file; None if it is not locked."""
        try:
            with open_no_follow(lock) as file:
                return LockOwner.parse(file.read(MOST_BYTES).decode())
        except (OSError, UnicodeDecodeError):
            return None

    def __str__(self) -> str:
        return f"{self.pid}.{self.start}.{self.host}"

    def alive(self) -> bool | None:
        """True if the process is running; None if it belongs to another host, where this is unknown."""
        if self.host != platform.node():
            return None
        if os.name != "posix":
            return True  # os.kill(pid, 0) would interrupt the process there
        try:
            os.kill(self.pid, 0)
        except (ProcessLookupError, OverflowError):
            return False
        except PermissionError:
            pass
        start = _start_time(self.pid)
        return start is None or not self.start or start == self.start


def _start_time(pid: int) -> str | None:
    """Boot id and start tick, `3f2a9c01-123456`; "dead" for a zombie; None without /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
        # The second field, the name, may contain spaces and brackets; the third, after the last bracket, is the state.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return "dead" if fields[0] in "ZX" else f"{boot}-{fields[19]}"
