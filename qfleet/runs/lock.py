"""Which process owns a file, and does it still live? Answers for the run's lock and for half-written checkpoints."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

from qfleet.runs.safe_open import open_no_follow

MOST_BYTES = 1000


@dataclass(frozen=True)
class LockOwner:
    """A process for all time: its number may be given again, but not with the same start on the same boot."""

    host: str
    pid: int
    start: str
    """Boot and clock tick at which the process began; empty where the system does not say."""

    @staticmethod
    def current() -> LockOwner:
        return LockOwner(platform.node(), os.getpid(), _birth(os.getpid()) or "")

    @staticmethod
    def parse(text: str) -> LockOwner | None:
        """Read what `str(owner)` wrote; None if it is something else."""
        pid, _, rest = text.strip().partition(".")
        start, separator, host = rest.partition(".")
        if not (separator and pid.isascii() and pid.isdigit()):
            return None
        return LockOwner(host, int(pid), start)

    @staticmethod
    def read(lock: Path) -> LockOwner | None:
        """Who holds a lock file; None if nobody does."""
        try:
            with open_no_follow(lock) as file:
                return LockOwner.parse(file.read(MOST_BYTES).decode())
        except (OSError, UnicodeDecodeError):
            return None

    def __str__(self) -> str:
        return f"{self.pid}.{self.start}.{self.host}"

    def alive(self) -> bool | None:
        """Whether the process runs; None if it belongs to another host, where nobody here can look."""
        if self.host != platform.node():
            return None
        if os.name != "posix":
            return True  # os.kill(pid, 0) is no harmless question there
        try:
            os.kill(self.pid, 0)
        except (ProcessLookupError, OverflowError):
            return False
        except PermissionError:
            pass
        birth = _birth(self.pid)
        return birth is None or not self.start or birth == self.start


def _birth(pid: int) -> str | None:
    """Boot id and start tick, `3f2a9c01-123456`; "dead" for a zombie; None where there is no /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
        # The name, second field, may hold blanks and brackets; the third, after the last bracket, is the state.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return "dead" if fields[0] in "ZX" else f"{boot}-{fields[19]}"
