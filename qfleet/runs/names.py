"""Finding a run by its path, its name under a root, a unique prefix of the name, or `last`.

Imports nothing outside of the standard library, so that tab completion stays fast.
"""

from __future__ import annotations

import difflib
import json
import os
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from qfleet.core.errors import UserError
from qfleet.runs.safe_open import open_no_follow

LAST = "last"
"""Word for the run that was started or resumed last."""

RECORD = "run.json"
MARKS = ("config.yaml", RECORD, "checkpoints")
SHOWN_NAMES = 8
"""Names that an error message lists at most."""


def is_run(path: Path) -> bool:
    return any(os.path.exists(path / mark) for mark in MARKS)


def run_names(root: str | Path) -> list[str]:
    """Names of the runs under root, most recently modified first."""
    folder = Path(root).expanduser()
    runs = [path for path in folder.iterdir() if path.name[0] != "." and is_run(path)] if folder.is_dir() else []
    return [path.name for path in sorted(runs, key=lambda path: path.stat().st_mtime, reverse=True)]


def find_run(where: str | Path, root: str | Path = "runs") -> Path:
    """Return the directory of a run; UserError if there is none, or if several names begin with `where`."""
    here = Path(where).expanduser()
    found = match_run(where, root)
    if found is not None:
        return found
    if os.path.isfile(here):  # False for a name that is too long
        foreign = "" if here.suffix == ".py" else "; models of other libraries cannot be read"
        raise UserError(f"{where} is a file, not a qfleet run: a run is a folder with config.yaml and "
                        f"checkpoints, and a checkpoint is a folder in checkpoints{foreign}")
    if str(where) == LAST:
        raise UserError(f"there is no last run: {Path(root).expanduser().resolve()} contains no runs (runs in another "
                        "folder: --root DIR)")
    raise UserError(f"no run {str(where)!r}, neither as a path nor as a name under {root}; "
                    f"{_similar_names(here.name, run_names(root), root)} (runs in another folder: --root DIR)")


def match_run(where: str | Path, root: str | Path = "runs") -> Path | None:
    """Return the directory of a run, or None. Exact paths and names come first, then `last`, then prefixes."""
    here, named = Path(where).expanduser(), Path(root).expanduser() / where
    for path in (here, named):
        if str(where) and is_run(path):
            return path
    if str(where) == LAST:
        return newest_run(root)
    if not str(where) or os.sep in str(where) or os.path.isfile(here):
        return None
    begun = sorted(name for name in run_names(root) if name.startswith(str(where)))
    if len(begun) > 1:
        more = f" and {len(begun) - SHOWN_NAMES} more" if len(begun) > SHOWN_NAMES else ""
        raise UserError(f"{len(begun)} runs under {root} begin with {str(where)!r}: {', '.join(begun[:SHOWN_NAMES])}"
                        f"{more}; type more of the name")
    return named.with_name(begun[0]) if begun else None


def settled_name(where: str, root: str | Path = "runs") -> str:
    """Return the path of a run that is named by `last` or a prefix; anything else unchanged.

    What these words mean changes with the next run, so a config stores the path.
    """
    if Path(where).expanduser().exists() or is_run(Path(root).expanduser() / where):
        return where
    return str(match_run(where, root) or where)


def absolute_name(where: str, root: str | Path = "runs") -> str:
    """Return the absolute path of a run or checkpoint, for a config with another root; an address is unchanged."""
    path = Path(where).expanduser()
    found = match_run(where, root) or (path if path.exists() else None)
    return where if found is None else str(found.absolute())


def newest_run(root: str | Path = "runs") -> Path | None:
    """Return the run under root that was started or resumed last; None if there are no runs."""
    folder = Path(root).expanduser()
    return max((folder / name for name in run_names(root)), key=start_order, default=None)


def start_order(run: Path) -> tuple[float, int]:
    """Key that sorts runs by their newest start. run.json stores seconds; the time of config.yaml breaks ties."""
    return started_at(run), _modified(run / "config.yaml")


def started_at(run: Path) -> float:
    """Time at which a run was started or resumed last, seconds since the epoch.

    It is the modification time of the directory if run.json is missing or names no start.
    """
    attempts = read_record(run).get("attempts")
    with suppress(KeyError, IndexError, TypeError, ValueError, OverflowError):
        if isinstance(attempts, list):
            return datetime.fromisoformat(attempts[-1]["started"]).timestamp()
    return _modified(run) / 1e9


def read_record(run: Path) -> dict[str, Any]:
    """Return run.json of a run; empty if it is missing or unreadable."""
    with suppress(OSError, ValueError, RecursionError):
        with open_no_follow(run / RECORD) as file:
            found = json.load(file)
        return found if isinstance(found, dict) else {}
    return {}


def _modified(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_mtime_ns
    return 0


def _similar_names(name: str, names: list[str], root: str | Path) -> str:
    """Suggest runs with a similar name and runs whose name begins with this one."""
    begun = [other for other in names if name and other.casefold().startswith(name.casefold())]
    close = list(dict.fromkeys(difflib.get_close_matches(name, names, n=3, cutoff=0.6) + begun))[:3]
    if close:
        return f"did you mean {', '.join(close)}?"
    folder = Path(root).expanduser().resolve()
    return f"{folder} contains no run with a similar name" if names else f"there are no runs in {folder} yet"
