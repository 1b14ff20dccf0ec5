"""From what a user names to a checkpoint: a run by path or name, or a checkpoint by path."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from qfleet.config import parse_mapping
from qfleet.runs.checkpoint import Checkpoint, Checkpoints, is_checkpoint, open_checkpoint
from qfleet.runs.directory import RunDirectory
from qfleet.types import UserError

Which = Literal["best", "latest"]
Place = str | Path


def find_checkpoint(path: Place, which: Which = "best", *, root: Place = "runs", trust: bool = False) -> Checkpoint:
    """The checkpoint that a path or a run's name means."""
    if is_checkpoint(path):
        checkpoint = open_checkpoint(path)
        own = (Path(path).expanduser().resolve().parent.parent / "run.json").exists() and _mine(Path(path))
        if not (own or trust):
            _refuse_imports(checkpoint)
        return checkpoint
    store = Checkpoints(RunDirectory.open(path, root).checkpoints, 1)
    found = store.newest("best", set_aside=False) if which == "best" else None
    found = found or store.newest("step", set_aside=False)
    if found is None:
        raise UserError(f"run {path} has no valid checkpoint yet")
    return found


def _mine(path: Path) -> bool:
    return not hasattr(os, "getuid") or path.expanduser().stat().st_uid == os.getuid()


def _refuse_imports(checkpoint: Checkpoint) -> None:
    """A stranger's checkpoint must not choose which code we import: that is for the user to say."""
    config = parse_mapping(checkpoint.config_text, str(checkpoint.path / "config.yaml"))
    named = [config.get("env", {}).get("id"), *config.get("env", {}).get("wrappers", []),
             config.get("agent", {}).get("algo"), config.get("agent", {}).get("torso"),
             config.get("explore", {}).get("kind")]
    asked = [name for name in named if isinstance(name, str) and ":" in name]
    if asked:
        raise UserError(f"checkpoint {checkpoint.path} asks to import {', '.join(asked)}, and it is not part of a run "
                        "of yours; if you trust it, pass --trust (in Python: trust=True)")
