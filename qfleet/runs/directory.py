"""The run directory: its files, its lock, and the record of versions and hardware in run.json.

    root/name/  config.yaml  run.json  metrics.jsonl  tb/  checkpoints/  videos/  plots/  lock

All paths in it are relative, so a run can be moved or renamed. Nothing is written outside of it.
"""

from __future__ import annotations

import json
import os
import platform
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from pydantic import Field, field_validator

from qfleet.config import Config, Positive, PositiveCount
from qfleet.config.objects import readable
from qfleet.core.errors import UserError
from qfleet.core.final_score import FinalScore
from qfleet.runs.lock import LockOwner
from qfleet.runs.machine import cpu_model, gpus, memory_bytes, package_versions
from qfleet.runs.names import find_run, read_record
from qfleet.runs.trust import fingerprint, owned

GIT_TIMEOUT_S = 5
NAME_BYTES = 200
ERROR_CHARACTERS = 300
PACKAGES = ("torch", "numpy", "gymnasium", "ale-py", "mujoco")


class RunSection(Config):
    """The run section: directory, logging, threads and exactness of resuming."""

    root: str = Field("runs", min_length=1, description="directory that contains the runs")
    name: str | None = Field(None, description="name of the run's directory; null = <env>__<algo>__<seed>__<time>")
    exact_resume: bool = Field(
        False, description="make a resumed run bitwise equal to an uninterrupted one: scheduled checkpoints end all "
                           "episodes; CPU only")
    log_period_steps: PositiveCount = Field(1000, description="environment steps between metric records")
    log_period_updates: PositiveCount | None = Field(
        None, description="updates between metric records, instead of log_period_steps")
    tensorboard: bool = Field(True, description="write TensorBoard event files in addition to metrics.jsonl")
    wandb: bool = Field(False, description="log to Weights & Biases too; offline unless WANDB_MODE is set")
    mlflow: bool = Field(
        False, description="log to MLflow too: to MLFLOW_TRACKING_URI, or to mlflow.db in run.root")
    stall_timeout_s: Positive = Field(
        600.0, description="end a process whose environment does not answer, or whose learner is stuck, for this "
                           "long, seconds")
    threads: PositiveCount | None = Field(
        None, description="PyTorch threads of a learner; null = planned from the cores")
    settled: tuple[str, ...] = Field(
        (), description="keys that qfleet decided, since they were auto or null; written by qfleet. A resume on "
                        "another kind of device decides them again")

    def inactive(self) -> dict[str, str]:
        return {"log_period_steps": "with run.log_period_updates"} if self.log_period_updates else {}

    @field_validator("name")
    @classmethod
    def _one_folder(cls, name: str | None) -> str | None:
        if name is None:
            return name
        if not name or name[0] in ".-~" or name != name.strip() or re.search(r"[/\\:\x00-\x1f\x7f]", name):
            raise ValueError("a run name is a single folder name: no slash, colon or line break, and no dot, dash, "
                             "tilde or space at its start; choose the parent folder with run.root")
        if len(name.encode()) > NAME_BYTES:
            raise ValueError(f"a run name has at most {NAME_BYTES} bytes")
        return name


def default_name(env_id: str, algo: str, seed: int, now: datetime | None = None) -> str:
    """Return `<env>__<algo>__<seed>__<time>` in characters that are safe in a path and in a shell."""
    parts = (re.sub(r"[^A-Za-z0-9._]+", "-", part).strip("-.")
             for part in (readable(env_id), algo, str(seed)))
    return f"{'__'.join(parts)}__{now or datetime.now():%Y%m%d-%H%M%S}"


@dataclass(frozen=True)
class RunDirectory:
    """A run on disk. Reading needs no lock; only the holder of the lock may write."""

    path: Path

    @staticmethod
    def create(section: RunSection, default: str) -> RunDirectory:
        """Create root/name and lock it. An existing name is refused if chosen by the user, numbered otherwise."""
        root = Path(section.root).expanduser()
        name = section.name or default
        try:
            root.mkdir(parents=True, exist_ok=True)
            attempt = 1
            while not _make(root / name):
                if section.name:
                    raise UserError(f"run {name} exists already in {root}: resume it with `qfleet resume {name}`, "
                                    f"or choose another run.name")
                attempt += 1
                name = f"{default}-{attempt}"
        except OSError as error:
            raise UserError(f"cannot write the run {root / name}: {_why_not(root, error)}; "
                            f"choose a writable folder with run.root") from error
        run = RunDirectory(root / name)
        try:
            run.lock()
            run._write_record({"id": secrets.token_hex(16), "home": fingerprint(run.path), "attempts": [],
                               "ended": None})
        except UserError:
            run.discard()
            raise
        except OSError as error:
            run.discard()
            raise UserError(f"cannot write the run {run.path}: {error.strerror}; free disk space, or choose another "
                            "folder with run.root") from error
        return run

    @staticmethod
    def open(where: str | Path, root: str | Path = "runs") -> RunDirectory:
        """Find a run by its path, its name under root, a unique prefix of the name, or `last`."""
        return RunDirectory(find_run(where, root))

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def record(self) -> Path:
        return self.path / "run.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tb"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def videos(self) -> Path:
        return self.path / "videos"

    @property
    def plots(self) -> Path:
        return self.path / "plots"

    def add_attempt(self, description: dict[str, Any]) -> None:
        """Append a start or resume, from `describe_machine`, to run.json: versions may differ between attempts."""
        record = self._read_record()
        attempts = record.get("attempts")
        self._write_record(record | {"attempts": [*(attempts if isinstance(attempts, list) else []), description],
                                     "ended": None})

    def conclude(self, reason: str, error: str = "", score: FinalScore | None = None) -> None:
        """Write to run.json how the last attempt ended: a reason of `StopRule`, or `failed` and the error."""
        ended: dict[str, Any] = {"reason": reason, "error": error[:ERROR_CHARACTERS]}
        if score is not None:
            ended["score"] = asdict(score)
        with suppress(OSError):  # a full disk has already been reported
            self._write_record(self._read_record() | {"ended": ended})

    def final_score(self) -> FinalScore | None:
        """Score of the best policy after the last attempt; None while that is running, or if it was not scored."""
        return FinalScore.from_json((self.ending() or {}).get("score"))

    def ending(self) -> dict[str, Any] | None:
        """Return what `conclude` wrote; None while the last attempt is running or if it died; empty for qfleet 0.1."""
        found = self._read_record().get("ended", {})
        return found if isinstance(found, dict) else None

    def note(self, key: str, value: Any) -> None:
        """Add an entry to run.json."""
        self._write_record(self._read_record() | {key: value})

    def entry(self, key: str) -> Any:
        """Return an entry of run.json; None if there is none."""
        return self._read_record().get(key)

    def has_id(self, run: str | None) -> bool:
        """True if this is the run of that id, or a copy of it.

        An unknown id counts as a match: checkpoints of earlier versions name no run, and run.json may be lost.
        """
        record = self._read_record()
        return run is None or not record or record.get("id") == run

    def ensure_id(self, known: str | None) -> str:
        """Return the run's id. If run.json has none, `known` or a new id is written to it."""
        record = self._read_record()
        found = record.get("id") or known or secrets.token_hex(16)
        if record.get("id") != found:
            self._write_record(record | {"id": found})
        return str(found)

    def attempts(self) -> list[dict[str, Any]]:
        """Return every start and resume, as `describe_machine` described it; unreadable entries are skipped."""
        found = self._read_record().get("attempts")
        return [attempt for attempt in found if isinstance(attempt, dict)] if isinstance(found, list) else []

    def has_gpu(self) -> bool:
        """True if the machine of the newest attempt has a GPU, or if that is unknown."""
        attempts = self.attempts()
        hardware = attempts[-1].get("hardware") if attempts else None
        return not isinstance(hardware, dict) or bool(hardware.get("gpus", True))

    def created_here(self) -> bool:
        """True if this user created the run on this machine: still true after a move or rename, false for a copy."""
        try:
            return owned(self.path, self.record) and self._read_record().get("home") == fingerprint(self.path)
        except OSError:
            return False

    def _read_record(self) -> dict[str, Any]:
        """Return run.json; empty if it is missing or unreadable."""
        return read_record(self.path)

    def _write_record(self, record: dict[str, Any]) -> None:
        replace_text(self.record, json.dumps(record, indent=2) + "\n")

    def lock(self) -> None:
        """Become the only writer. The lock of a dead process is taken over; that of a live one raises UserError."""
        try:
            with self._lock_file() as file:
                owner = LockOwner.parse(file.read())
                alive = owner.alive() if owner else False
                if owner and alive is not False:
                    raise UserError(_in_use(self.path, owner, alive is None))
                file.seek(0)
                file.truncate()
                file.write(f"{LockOwner.current()}\n")
        except OSError as error:
            raise UserError(f"cannot lock the run {self.path}: {error.strerror}; free disk space and make it writable, "
                            f"or choose another folder with run.root") from error

    def unlock(self) -> None:
        """Release the lock, unless it belongs to another process."""
        with suppress(OSError), self._lock_file() as file:
            owner = LockOwner.parse(file.read())
            if owner is None or owner == LockOwner.current():
                (self.path / "lock").unlink()

    def discard(self) -> None:
        """Remove a run that never started: it contains only its description."""
        shutil.rmtree(self.path, ignore_errors=True)

    @contextmanager
    def _lock_file(self) -> Iterator[TextIO]:
        """Yield the lock file under an exclusive flock, so that two processes cannot both find it stale."""
        path = self.path / "lock"
        while True:
            with path.open("a+") as file:
                _flock(file)
                # Another process may have unlocked and unlinked this file meanwhile: then open the new one.
                if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    file.seek(0)
                    yield file
                    return


def replace_text(path: Path, text: str) -> None:
    """Replace a file atomically: after a crash, and for any reader, it holds the old text or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def describe_machine() -> dict[str, Any]:
    """Describe an attempt for run.json: command, time, versions, hardware and git state of the working directory."""
    return {
        "command": sys.argv,
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "directory": str(Path.cwd()),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": package_versions(PACKAGES),
        "hardware": _hardware(),
        "git": _git(),
    }


def _make(path: Path) -> bool:
    try:
        path.mkdir()
    except FileExistsError:
        return False
    return True


def _why_not(folder: Path, error: OSError) -> str:
    """Explain why a folder cannot be created, by the first of its parents that exists."""
    there = next((path for path in (folder, *folder.absolute().parents) if path.exists()), Path("/"))
    if not there.is_dir():
        return f"{there} is a file, not a folder"
    return f"no folder can be created in {there}" if isinstance(error, FileNotFoundError) else str(error.strerror)


def _in_use(path: Path, owner: LockOwner, unknown: bool) -> str:
    who = f"process {owner.pid} on {owner.host}"
    if unknown:
        return f"another run writes here: {path} is locked by {who}; if that process is gone, delete {path / 'lock'}"
    if owner == LockOwner.current():
        return (f"another run writes here: {path} is in use by this process; close the open qfleet.Run, or choose "
                "another run.name")
    return f"another run writes here: {path} is in use by {who}; wait for it, stop it, or choose another run.name"


def _flock(file: TextIO) -> None:
    """Lock the file exclusively; where that is not supported (Windows, some network disks) a small race remains."""
    with suppress(ImportError, OSError):
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX)


def _hardware() -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"cpu": cpu_model(), "cores": cores, "memory_bytes": memory_bytes(), "gpus": [gpu["name"] for gpu in gpus()]}


def _git() -> dict[str, Any] | None:
    """Commit of the working directory, and True for `dirty` if tracked files differ; None outside of a repository."""
    outputs = []
    for command in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"]):
        try:
            done = subprocess.run(["git", *command], capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        outputs.append(done.stdout.strip())
    return {"commit": outputs[0], "dirty": bool(outputs[1])}
