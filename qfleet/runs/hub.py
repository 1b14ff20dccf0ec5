"""Policies on the Hugging Face Hub: `hf:USER/NAME`, or `hf:USER/NAME@REVISION`, is downloaded to a checkpoint."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

from qfleet.core.errors import UserError
from qfleet.core.extras import require_module
from qfleet.runs.atomic import atomic_directory, discard
from qfleet.runs.checkpoint import CONFIG, MANIFEST, POLICY, CheckpointDamaged, open_checkpoint

PREFIX = "hf:"
REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
FILES = (MANIFEST, CONFIG, POLICY)
"""The files of a policy. Others of the repository, such as its video, are not downloaded."""

BLOCK_BYTES = 2**20


def is_on_hub(path: str | Path) -> bool:
    return str(path).startswith(PREFIX)


def repository(path: str | Path) -> tuple[str, str | None]:
    """Repository and revision of an `hf:` name."""
    repo, at, revision = str(path).removeprefix(PREFIX).partition("@")
    if not REPO.fullmatch(repo) or (at and not re.fullmatch(r"[\w./-]+", revision)):
        raise UserError(f"{path} is not the name of a policy on the Hugging Face Hub: write hf:USER/NAME, or "
                        "hf:USER/NAME@REVISION for a branch, tag or commit")
    return repo, revision or None


def download(path: str | Path) -> Path:
    """Download a policy, or find it in the cache of huggingface_hub; returns a directory that is a checkpoint."""
    repo, revision = repository(path)
    library, constants = (require_module(name, "hub", "policies on the Hugging Face Hub")
                          for name in ("huggingface_hub", "huggingface_hub.constants"))
    try:
        folder = Path(library.snapshot_download(repo, revision=revision, allow_patterns=list(FILES)))
    except Exception as error:  # of the library, the network or the Hub
        raise UserError(f"cannot download {path}: {_reason(error, revision)}") from error
    if not (folder / MANIFEST).is_file():
        raise UserError(f"{path} is not a policy of qfleet: it has no {MANIFEST} (`qfleet share` uploads policies)")
    if not any((folder / name).is_symlink() for name in FILES):
        return folder
    return _without_links(folder, Path(constants.HF_HOME) / "qfleet" / repo.replace("/", "--"))


def _without_links(folder: Path, copies: Path) -> Path:
    """Copy of a commit in the cache, which consists of links; a checkpoint has none. It is made once."""
    target = copies / folder.name
    if target.exists():
        try:
            return open_checkpoint(target).path
        except CheckpointDamaged:
            discard(target)
    try:
        with atomic_directory(target) as draft:
            for name in FILES:
                if (folder / name).is_file():
                    with (folder / name).open("rb") as file:
                        draft.write(name, iter(partial(file.read, BLOCK_BYTES), b""))
    except OSError as error:
        if not target.is_dir():  # else another process made the same copy
            raise UserError(f"cannot write {target}: {error.strerror}") from error
    return target


def _reason(error: Any, revision: str | None) -> str:
    """Why a download failed, and the remedy. The classes are those of huggingface_hub, whose modules differ."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "GatedRepoError" in kinds:
        return "its owner must grant you access first: request it on the page of the repository"
    if "RepositoryNotFoundError" in kinds:
        return "there is no such repository, or it is private (log in with `hf auth login`)"
    if "RevisionNotFoundError" in kinds:
        return f"it has no revision {revision}"
    if kinds & {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectionError", "ConnectError", "Timeout"}:
        return "the Hub cannot be reached, and the policy is not in the cache of earlier downloads"
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
