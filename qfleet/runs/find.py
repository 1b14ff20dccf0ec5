"""Find a checkpoint from a run's path or name or from its own path, and check whether it is trusted."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any, Literal, get_args

from qfleet.config import parse_mapping, read_yaml, without
from qfleet.config.objects import is_object, texts_of
from qfleet.core.errors import UserError
from qfleet.runs import hub
from qfleet.runs.checkpoint import Checkpoint, Checkpoints, is_checkpoint, open_checkpoint
from qfleet.runs.directory import RunDirectory

Which = Literal["best", "latest"]
StrPath = str | os.PathLike[str]

HARMLESS = ("description", "device", "init_from", "run", "fleet")
"""Parts of a config that may contain a colon and are never imported: `cuda:0`, folders, ports, descriptions."""

TRAINING_ONLY = ("callbacks", "sync", "launcher", "learner.optimizer", "learner.optimizer_options", "learner.schedule",
                 "replay.store")
"""Keys whose code a learner imports; one that acts or evaluates does not."""


def find_checkpoint(path: StrPath, which: Which = "best", *, root: StrPath = "runs", trust: bool = False) -> Checkpoint:
    """Return the checkpoint for a path, a run's name or a policy on the Hugging Face Hub (`hf:USER/NAME`).

    Without `trust`, only runs created on this machine by this user may name code to import.
    """
    if which not in get_args(Which):
        raise UserError(f"which={which!r}: must be {' or '.join(get_args(Which))}")
    path = os.fspath(path)
    if hub.is_on_hub(path):
        path = hub.download(path)
    checkpoint = open_checkpoint(path) if is_checkpoint(path) else _of_run(path, which, root)
    if not (trust or RunDirectory(checkpoint.path.resolve().parent.parent).created_here()):
        config = parse_mapping(checkpoint.config_text, str(checkpoint.path / "config.yaml"))
        refuse_imports(acting_part(config), f"checkpoint {checkpoint.path}",
                       "it is not part of a run created here by you")
    return checkpoint


def require_trusted(run: RunDirectory) -> None:
    """Refuse a foreign run that names code. Call it before validating the config, which imports that code."""
    if not run.created_here():
        refuse_imports(read_yaml(run.config), f"run {run.path}", "it was not created here by you (it may be a copy)")


def require_no_outside_links(run: RunDirectory) -> None:
    """Refuse a foreign run with links to outside. Call it before writing: the links could lead to any file."""
    if run.created_here():
        return
    for folder, folders, files in os.walk(run.path):
        for path in (Path(folder, name) for name in (*folders, *files)):
            if path.is_symlink() and not path.resolve().is_relative_to(run.path.resolve()):
                raise UserError(f"{path} is a link to {os.readlink(path)}, through which the run would write, and it "
                                "was not created here by you (it may be a copy): remove the link, or if you trust the "
                                "run, pass --trust (in Python: trust=True)")


def _of_run(path: StrPath, which: Which, root: StrPath) -> Checkpoint:
    store = Checkpoints(RunDirectory.open(os.fspath(path), os.fspath(root)).checkpoints, 1)
    found = store.newest("best", set_aside=False) if which == "best" else None
    found = found or store.newest("step", set_aside=False)
    if found is None:
        raise UserError(f"run {path} has no valid checkpoint yet")
    return found


def refuse_imports(config: Mapping[str, Any], what: str, why: str) -> None:
    """Refuse a config that names code outside of the package: importing it is the user's decision."""
    if names := foreign_names(config):
        raise UserError(f"{what} imports {', '.join(names)}, and {why}; if you trust it, pass --trust "
                        "(in Python: trust=True)")


def acting_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config without the code that only a learner imports."""
    return reduce(without, TRAINING_ONLY, config)


def foreign_names(config: Mapping[str, Any]) -> list[str]:
    """Texts in a config that may name code outside of the package; optimizers of torch are not the user's code."""
    learner = config.get("learner")
    if isinstance(learner, Mapping) and str(learner.get("optimizer")).startswith(("torch.optim:", "torch.optim.")):
        config = {**config, "learner": {key: value for key, value in learner.items() if key != "optimizer"}}
    # The config of a run never contains `extends`, and the file it names could name any code.
    return [text for name, part in config.items() if name not in HARMLESS for text in texts_of(part)
            if (":" in text and not is_object(text)) or name == "extends"]
