"""Removal of runs, or of all their checkpoints but the best policy."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from qfleet.core.errors import UserError
from qfleet.runs.atomic import temporary_name
from qfleet.runs.directory import RunDirectory
from qfleet.runs.disk_space import disk_usage
from qfleet.runs.names import is_run, read_record
from qfleet.runs.run_state import run_state

BEST = "best-"


def require_removable(run: RunDirectory) -> None:
    """UserError unless this is a directory that qfleet wrote as a run, and no process uses it."""
    path = run.path
    if path.is_symlink():
        raise UserError(f"{path} is a link to {os.readlink(path)}, and links are not followed: remove the link by "
                        "hand, or name the run itself")
    record = read_record(path)
    if not (isinstance(record.get("id"), str) and isinstance(record.get("attempts"), list)):
        raise UserError(f"{path} is not a run that qfleet can remove, its run.json is missing or unreadable: remove "
                        "the directory by hand")
    if inside := sorted(child.name for child in path.iterdir() if child.is_dir() and is_run(child)):
        raise UserError(f"{path} contains other runs ({', '.join(inside[:3])}): remove or move them first")
    state = run_state(run)
    if state == "running":
        raise UserError(f"{path} is running: stop it first")
    if state == "elsewhere":
        raise UserError(f"{path} is locked by another host and may be running: if it is not, delete {path / 'lock'}")


def remove_run(run: RunDirectory) -> int:
    """Remove a run; returns the freed bytes."""
    freed = freed_by(run, keep_best=False)
    with _locked(run):
        _remove(run.path)
    return freed


def has_best(run: RunDirectory) -> bool:
    """True if the run has a best policy that `remove_checkpoints` would keep."""
    return any(path.is_dir() and not path.is_symlink() for path in run.checkpoints.glob(f"{BEST}*"))


def remove_checkpoints(run: RunDirectory) -> int:
    """Remove all checkpoints but the best policies; returns the freed bytes. The run can no longer be resumed."""
    if not has_best(run):
        raise UserError(f"{run.path} has no best policy to keep: remove all of it without --keep-best, or leave it")
    freed = freed_by(run, keep_best=True)
    with _locked(run):
        run.note("checkpoints_removed", datetime.now().astimezone().isoformat(timespec="seconds"))
        for path in _besides_best(run):
            _remove(path)
    return freed


def freed_by(run: RunDirectory, keep_best: bool) -> int:
    """Bytes that removing the run, or its checkpoints, frees."""
    if not keep_best:
        return disk_usage(run.path).freed
    return sum(disk_usage(path).freed for path in _besides_best(run))


def _besides_best(run: RunDirectory) -> list[Path]:
    return [path for path in sorted(run.checkpoints.iterdir())
            if not path.name.startswith(BEST) and path.is_dir() and not path.is_symlink()]


@contextmanager
def _locked(run: RunDirectory) -> Iterator[None]:
    """Hold the run's lock, so that no process resumes it meanwhile. The checks are repeated first."""
    require_removable(run)
    run.lock()
    try:
        yield
    finally:
        if run.path.exists():
            run.unlock()


def _remove(folder: Path) -> None:
    """Remove a directory.

    It is renamed first, so that no reader finds it partly removed. Links in it are removed, not followed.
    """
    place = folder.resolve()  # "." cannot be renamed
    hidden = temporary_name(place)
    try:
        place.rename(hidden)
    except OSError as error:
        raise UserError(f"{folder} cannot be removed: {error.strerror}") from None
    shutil.rmtree(hidden, ignore_errors=True)
    if hidden.exists():
        raise UserError(f"{folder} could not be removed completely: the rest is in {hidden}")
