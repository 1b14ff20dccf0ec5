"""From what a user names to a checkpoint: a run by path or name, or a checkpoint by path; and whether to trust it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from qfleet.config import parse_mapping, read_yaml
from qfleet.core.errors import UserError
from qfleet.runs.checkpoint import Checkpoint, Checkpoints, is_checkpoint, open_checkpoint
from qfleet.runs.directory import RunDirectory

Which = Literal["best", "latest"]
StrPath = str | Path

HARMLESS = ("description", "device", "init_from", "run", "fleet")
"""Parts of a config that may hold a colon and are never imported: `cuda:0`, folders, ports, prose."""


def find_checkpoint(path: StrPath, which: Which = "best", *, root: StrPath = "runs", trust: bool = False) -> Checkpoint:
    """The checkpoint that a path or a run's name means; without `trust`, only our own runs may name code to import."""
    if which not in get_args(Which):
        raise UserError(f"which={which!r}: must be {' or '.join(get_args(Which))}")
    checkpoint = open_checkpoint(path) if is_checkpoint(path) else _of_run(path, which, root)
    if not (trust or RunDirectory(checkpoint.path.resolve().parent.parent).created_here()):
        config = parse_mapping(checkpoint.config_text, str(checkpoint.path / "config.yaml"))
        refuse_imports(config, f"checkpoint {checkpoint.path}", "it is not part of a run that you made here")
    return checkpoint


def require_trusted(run: RunDirectory) -> None:
    """To be asked before the config of a run is validated, since that imports what it names."""
    if not run.created_here():
        refuse_imports(read_yaml(run.config), f"run {run.path}", "you did not make it here (it is a copy, perhaps)")


def require_no_outside_links(run: RunDirectory) -> None:
    """To be asked before anything is written into a run: one from elsewhere could hold links to any file."""
    if run.created_here():
        return
    for folder, folders, files in os.walk(run.path):
        for path in (Path(folder, name) for name in (*folders, *files)):
            if path.is_symlink() and not path.resolve().is_relative_to(run.path.resolve()):
                raise UserError(f"{path} is a link to {os.readlink(path)}, through which the run would write, and you "
                                "did not make it here (it is a copy, perhaps): remove the link, or if you trust the "
                                "run, pass --trust (in Python: trust=True)")


def _of_run(path: StrPath, which: Which, root: StrPath) -> Checkpoint:
    store = Checkpoints(RunDirectory.open(path, root).checkpoints, 1)
    found = store.newest("best", set_aside=False) if which == "best" else None
    found = found or store.newest("step", set_aside=False)
    if found is None:
        raise UserError(f"run {path} has no valid checkpoint yet")
    return found


def refuse_imports(config: Mapping[str, Any], what: str, why: str) -> None:
    """A stranger's config must not choose which code we import: that is for the user to say."""
    if asked := foreign_names(config):
        raise UserError(f"{what} asks to import {', '.join(asked)}, and {why}; if you trust it, pass --trust "
                        "(in Python: trust=True)")


def foreign_names(config: Mapping[str, Any]) -> list[str]:
    """Everything in a config that may be code outside of the package."""
    # No run is written with `extends`, and the file that it names could name anything.
    return [text for name, part in config.items() if name not in HARMLESS for text in _texts(part)
            if ":" in text or name == "extends"]


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
