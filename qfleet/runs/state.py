"""Whether a run is going on: told from outside, by the lock that its writer holds."""

from __future__ import annotations

from typing import Literal

from qfleet.runs.directory import RunDirectory
from qfleet.runs.owner import Owner

State = Literal["running", "ended", "died", "elsewhere"]

WORDS: dict[State, str] = {
    "running": "is running",
    "ended": "has ended",
    "died": "is not running: its process died without ending it; `qfleet resume` goes on from its newest checkpoint",
    "elsewhere": "runs on another host, or did: from here nobody can tell",
}


def going_on(state: State) -> bool:
    """Whether the run goes on, as far as can be told from here."""
    return state in ("running", "elsewhere")


def state_of(run: RunDirectory) -> State:
    owner = Owner.of(run.path / "lock")
    if owner is None:
        return "ended"
    alive = owner.alive()
    return "elsewhere" if alive is None else "running" if alive else "died"
