"""State of a run as seen by another process, from its lock and run.json: running, or how it ended."""

from __future__ import annotations

from typing import Literal

from qfleet.runs.directory import RunDirectory
from qfleet.runs.lock import LockOwner

RunState = Literal["running", "ended", "stopped", "interrupted", "pruned", "failed", "died", "elsewhere"]

STATE_TEXT: dict[RunState, str] = {
    "running": "is running",
    "ended": "has ended",
    "stopped": "was stopped by the program or a callback",
    "interrupted": "was interrupted",
    "pruned": "was pruned: a study stopped it, since other trials scored better",
    "failed": "has failed",
    "died": "is not running: its process died",
    "elsewhere": "is locked by another host: it may or may not be running",
}


def may_be_running(state: RunState) -> bool:
    """True if the run is running, or locked by another host, where this is unknown."""
    return state in ("running", "elsewhere")


def run_state(run: RunDirectory) -> RunState:
    owner = LockOwner.read(run.path / "lock")
    alive = owner.alive() if owner is not None else False
    if alive is not False:
        return "elsewhere" if alive is None else "running"
    ending = run.ending()
    if ending is None or (owner is not None and not ending):
        return "died"
    reason = ending.get("reason")
    if reason in ("interrupted", "preempted"):
        return "interrupted"
    return reason if reason in ("failed", "pruned", "stopped") else "ended"


def describe_state(run: RunDirectory, state: RunState) -> str:
    """Describe the state in words: what went wrong, and what `qfleet resume` would do."""
    if may_be_running(state) or state in ("ended", "pruned"):
        return STATE_TEXT[state]
    error = (run.ending() or {}).get("error")
    why = f": {_printable(error).rstrip('.')}" if state == "failed" and isinstance(error, str) and error else ""
    saved = any(run.checkpoints.glob("step-*"))
    remedy = "continues from its newest checkpoint" if saved else "starts it again, there is no checkpoint yet"
    return f"{STATE_TEXT[state]}{why}; `qfleet resume` {remedy}"


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text)
