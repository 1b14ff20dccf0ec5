"""Small processes to be supervised, and ways to look at processes from outside."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from qfleet.process.supervisor import ChildSpec, RestartPolicy, Supervisor

TAKE = """
import os, signal, subprocess, sys, time
from qfleet.process.heartbeat import HeartbeatSender
tether = HeartbeatSender.from_env()
"""
BEAT = "while True:\n    tether.beat()\n    time.sleep(0.02)\n"
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
QUICK = RestartPolicy(heartbeat_timeout_s=1.5, first_beat_s=30, healthy_s=60, max_restarts=3, pause_s=0.1,
                      longest_pause_s=0.4)


def child(home: Path, name: str, text: str = BEAT, **env: str) -> ChildSpec:
    """A process that takes its tether and does what `text` says."""
    return ChildSpec(name, [sys.executable, "-c", TAKE + text], env, home / f"{name}.log")


def until(condition: Callable[[], object], supervisor: Supervisor | None = None, within_s: float = 30.0) -> float:
    """Wait for a condition, stepping the supervisor meanwhile; how long it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < within_s, "it did not come true"
        if supervisor is not None:
            supervisor.step()
        time.sleep(0.005)
    return time.monotonic() - began


def all_restarts(supervisor: Supervisor) -> int:
    """Restarts of all children together."""
    return sum(supervisor.restarts(name) for name in supervisor.names)


def alive(pid: int) -> bool:
    """Whether a process runs or is stopped. One that is dead and not reaped is dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def children() -> set[int]:
    """All children of this process, the dead ones that nobody reaped among them."""
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.add(int(entry.name))
        except OSError:
            continue
    return found


def numbers(path: Path) -> list[int]:
    """The process numbers that were written to a file so far, one a line."""
    return [int(line) for line in path.read_text().split()] if path.exists() else []
