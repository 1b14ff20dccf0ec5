"""From what a user names to a checkpoint: a run by path or name, or a checkpoint by path."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from qfleet.config import parse_mapping
from qfleet.runs.checkpoint import Checkpoint, Checkpoints, is_checkpoint, open_checkpoint
from qfleet.runs.directory import RunDirectory
from qfleet.types import UserError

Which = Literal["best", "latest"]
Place = str | Path


def find_checkpoint(path: Place, which: Which = "best", *, root: Place = "runs", trust: bool = False) -> Checkpoint:
    """The checkpoint that a path or a run's name means; one that is not of a run of ours names no code to import."""
    checkpoint = open_checkpoint(path) if is_checkpoint(path) else _of_run(path, which, root)
    if not (trust or _own(checkpoint.path.resolve())):
        _refuse_imports(checkpoint)
    return checkpoint


def _of_run(path: Place, which: Which, root: Place) -> Checkpoint:
    store = Checkpoints(RunDirectory.open(path, root).checkpoints, 1)
    found = store.newest("best", set_aside=False) if which == "best" else None
    found = found or store.newest("step", set_aside=False)
    if found is None:
        raise UserError(f"run {path} has no valid checkpoint yet")
    return found


def _own(checkpoint: Path) -> bool:
    """Whether a checkpoint lies in a run that belongs to the user who asks."""
    record = checkpoint.parent.parent / "run.json"
    return record.exists() and (not hasattr(os, "getuid") or record.stat().st_uid == os.getuid())


def _refuse_imports(checkpoint: Checkpoint) -> None:
    """A stranger's checkpoint must not choose which code we import: that is for the user to say."""
    config = parse_mapping(checkpoint.config_text, str(checkpoint.path / "config.yaml"))
    asked = [text for section in ("env", "agent", "explore") for text in _texts(config.get(section)) if ":" in text]
    if asked:
        raise UserError(f"checkpoint {checkpoint.path} asks to import {', '.join(asked)}, and it is not part of a run "
                        "of yours; if you trust it, pass --trust (in Python: trust=True)")


def _texts(value: Any) -> Iterator[str]:
    """Every text in a tree: any of them may be one that somebody imports."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)
