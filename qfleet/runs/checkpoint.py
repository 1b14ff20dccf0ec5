"""Checkpoints: directories written atomically, with a manifest that holds the hash of every file.

    checkpoints/step-000000012345/     everything needed to resume (kind "full")
    checkpoints/best-000000012000/     the policy alone (kind "policy")
        policy.safetensors  config.yaml
        state.json  state.safetensors  *.seg               full only; *.seg is replay
        manifest.json                                      written last: size and sha256 of each file

A run resumes from its newest valid checkpoint; a damaged one is renamed, never deleted. Nothing is unpickled, and
names, sizes and hashes are checked before any file is parsed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import safetensors.torch
import torch
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from qfleet import __version__
from qfleet.core.env import EnvSpec
from qfleet.core.errors import UserError
from qfleet.core.replay import Segment
from qfleet.runs import state_tree
from qfleet.runs.atomic import AtomicDirectory, FileEntry, atomic_directory, discard, remove_stale

log = logging.getLogger(__name__)

FORMAT_VERSION = 3
"""Version of the checkpoint format. 1 stored equal arrays of the state repeatedly; 2 stores them once, and arrays of
the policy in the policy file only; 3 adds the run id to the manifest. All versions remain readable; a new version adds
a checkpoint to tests/runs/golden."""
MANIFEST, POLICY, CONFIG = "manifest.json", "policy.safetensors", "config.yaml"
STATE, ARRAYS, SEGMENT = "state.json", "state.safetensors", ".seg"
JSON_BYTES, CONFIG_BYTES, DATA_BYTES = 2**24, 2**20, 2**36
"""Size limits for writing and reading, by kind of file: parsed JSON takes many times its size in memory."""
LIMITS = {MANIFEST: JSON_BYTES, STATE: JSON_BYTES, CONFIG: CONFIG_BYTES}
FILE_NAME = r"policy\.safetensors|config\.yaml|state\.json|state\.safetensors|[A-Za-z0-9][A-Za-z0-9_-]{0,120}\.seg"
"""Without a slash or a second dot, a manifest cannot refer to files outside its own directory."""


class CheckpointDamaged(UserError):
    """A checkpoint differs from what was written: truncated, altered or incomplete."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"checkpoint {path} is damaged: {why}; name another checkpoint of the run, "
                         f"or resume the run itself, which takes the newest valid one")
        self.why = why


class Manifest(BaseModel):
    """Contents of a checkpoint. The file also holds the sha256 of the manifest, in this and every later format."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    format_version: int = Field(ge=1, le=FORMAT_VERSION)
    qfleet: str
    kind: Literal["full", "policy"]
    step: int = Field(ge=0)
    updates: int = Field(ge=0)
    created: str
    run: Annotated[str, StringConstraints(max_length=64)] | None = None
    env: dict[str, Any]
    notes: dict[str, float | None]
    files: dict[Annotated[str, StringConstraints(pattern=f"^(?:{FILE_NAME})$")], FileEntry]

    @property
    def moment(self) -> tuple[int, int]:
        """Steps and updates."""
        return self.step, self.updates

    @model_validator(mode="after")
    def _complete(self) -> Manifest:
        needed = {POLICY, CONFIG} | ({STATE, ARRAYS} if self.kind == "full" else set())
        if missing := needed - set(self.files):
            raise ValueError(f"no {', '.join(sorted(missing))}")
        return self


@dataclass(frozen=True)
class CheckpointMeta:
    """Description of the run in a checkpoint: config as YAML, environment, numbers such as a score, id of the run."""

    config: str
    spec: EnvSpec
    notes: Mapping[str, float] = field(default_factory=dict)
    run: str | None = None


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk. Its parts are read on demand, to the CPU."""

    path: Path
    manifest: Manifest

    @property
    def spec(self) -> EnvSpec:
        try:
            return EnvSpec.from_json(self.manifest.env)
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointDamaged(self.path, f"{MANIFEST} does not describe an environment ({error!r})") from error

    @property
    def config_text(self) -> str:
        """The run's resolved config as YAML text, not parsed."""
        try:
            return self._read(CONFIG).decode()
        except UnicodeDecodeError as error:
            raise CheckpointDamaged(self.path, f"{CONFIG} is not UTF-8 text") from error

    def policy(self) -> dict[str, torch.Tensor]:
        return self._tensors(POLICY)

    def state(self) -> Any:
        """The tree given to `save`, value for value."""
        if self.manifest.kind != "full":
            raise UserError(f"checkpoint {self.path} contains only the policy and cannot be resumed; "
                            f"use it with eval, record or init_from")
        try:
            document = json.loads(self._read(STATE))
            return state_tree.unpack(document, self._tensors(ARRAYS) | _shared_arrays(self.policy()))
        except (ValueError, TypeError, RecursionError) as error:
            raise CheckpointDamaged(self.path, f"{STATE} cannot be read ({error})") from error

    def segments(self) -> list[tuple[str, Path]]:
        """Name and file of every replay segment, in the order they were saved."""
        names = [name for name in self.manifest.files if name.endswith(SEGMENT)]
        return [(name.removesuffix(SEGMENT), self.path / name) for name in names]

    def verify(self) -> None:
        """Compare every file with the manifest; raises `CheckpointDamaged` at the first difference."""
        for name, entry in self.manifest.files.items():
            _check_size(self.path, name, entry.size)
            try:
                with (self.path / name).open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
            except OSError as error:
                raise CheckpointDamaged(self.path, f"{name} cannot be read ({error.strerror})") from error
            if digest != entry.sha256:
                raise CheckpointDamaged(self.path, f"the contents of {name} have changed since it was written")

    def _read(self, name: str) -> bytes:
        return _read(self.path, name, self.manifest.files[name].size)

    def _tensors(self, name: str) -> dict[str, torch.Tensor]:
        try:
            return safetensors.torch.load(self._read(name))
        except (safetensors.SafetensorError, ValueError, KeyError, RuntimeError, AssertionError) as error:
            raise CheckpointDamaged(self.path, f"{name} is not a safetensors file ({error})") from error


def is_checkpoint(path: str | Path) -> bool:
    return os.path.isfile(Path(path).expanduser() / MANIFEST)  # also False for an invalid path


def open_checkpoint(path: str | Path, *, verify: bool = True) -> Checkpoint:
    """Open a checkpoint by its path and verify it; any defect raises a UserError that names it."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise UserError(f"no checkpoint {folder}: name a directory such as RUN/checkpoints/step-000000012345")
    if not (folder / MANIFEST).exists():
        raise CheckpointDamaged(folder, f"it has no {MANIFEST}, so it is not a checkpoint or is incomplete")
    try:
        body = json.loads(_read(folder, MANIFEST))
        digest = body.pop("sha256")
        if digest != _digest(body):
            raise CheckpointDamaged(folder, f"the contents of {MANIFEST} have changed since it was written")
        version = body["format_version"]
        if isinstance(version, int) and version > FORMAT_VERSION:
            raise UserError(f"checkpoint {folder} has format {version}, written by qfleet {body.get('qfleet')}; this "
                            f"qfleet {__version__} reads up to format {FORMAT_VERSION}: pip install --upgrade qfleet")
        checkpoint = Checkpoint(folder, Manifest.model_validate(body))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise CheckpointDamaged(folder, f"{MANIFEST} is malformed ({place}: {first['msg']})") from error
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointDamaged(folder, f"{MANIFEST} is malformed ({error!r:.200})") from error
    if verify:
        checkpoint.verify()
    return checkpoint


def export_policy(checkpoint: Checkpoint, out: str | Path) -> Path:
    """Write only the policy of a checkpoint, as a new checkpoint at `out`."""
    target = Path(out).expanduser()
    if target.exists():
        raise UserError(f"{target} exists already: choose another path, or delete it")
    was = checkpoint.manifest
    notes = {name: math.nan if value is None else value for name, value in was.notes.items()}
    meta = CheckpointMeta(checkpoint.config_text, checkpoint.spec, notes, was.run)
    try:
        with atomic_directory(target) as draft:
            _write_policy(draft, checkpoint.policy(), meta)
            _seal(draft, "policy", was.step, was.updates, meta)
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror}") from error
    return target


class Checkpoints:
    """The checkpoints of a run: the newest `keep` of `step-*`, and one policy per other name (`best-*`).

    Only the holder of the run's lock saves. A failed save raises OSError (DiskFull if the disk is full) and changes
    nothing. Replay segments are hard-linked from the previous checkpoint: equal names mean equal bytes only within one
    lineage, so the source is always a checkpoint saved by this object or given to `resume_from`.
    """

    def __init__(self, root: Path, keep: int) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep}: at least one checkpoint must be kept")
        self.root, self.keep = root, keep
        self._previous: Checkpoint | None = None

    def resume_from(self, checkpoint: Checkpoint) -> None:
        """Set the checkpoint that the run resumes from: the next one may link its replay files."""
        self._previous = checkpoint

    def save(
        self,
        step: int,
        updates: int,
        policy: Mapping[str, torch.Tensor],
        state: Any,
        segments: Iterable[Segment],
        meta: CheckpointMeta,
    ) -> Path:
        """Write a full checkpoint; after the return it survives a power failure."""
        remove_stale(self.root)
        target = self._unused_path("step", step)
        with atomic_directory(target) as draft:
            weights = _write_policy(draft, policy, meta)
            document, arrays = state_tree.pack(state, _shared_arrays(weights))
            draft.write(STATE, [_limited(STATE, json.dumps(document, allow_nan=False).encode())])
            draft.write(ARRAYS, [safetensors.torch.save(arrays)])
            for segment in segments:
                self._write_segment(draft, segment)
            manifest = _seal(draft, "full", step, updates, meta)
        self._previous = Checkpoint(target, manifest)
        self._rotate("step", self.keep, target)
        return target

    def save_policy(
        self, step: int, updates: int, policy: Mapping[str, torch.Tensor], meta: CheckpointMeta, name: str = "best",
    ) -> Path:
        """Write a policy checkpoint and remove the previous one of that name."""
        if not re.fullmatch("[a-z]+", name) or name == "step":
            raise ValueError(f"{name!r} cannot name a policy")
        remove_stale(self.root)
        target = self._unused_path(name, step)
        with atomic_directory(target) as draft:
            _write_policy(draft, policy, meta)
            _seal(draft, "policy", step, updates, meta)
        self._rotate(name, 1, target)
        return target

    def newest(self, name: str = "step", *, set_aside: bool = True) -> Checkpoint | None:
        """Return the newest valid checkpoint of a name, or None. Damaged newer ones are renamed `*.corrupt`.

        Readers of a run that may be in progress pass `set_aside=False`.
        """
        # A listing taken while the run saves and rotates may miss both the old and the new one: list twice.
        for folder in reversed(self.series(name) or self.series(name)):
            try:
                return open_checkpoint(folder)
            except UserError as fault:
                if not folder.exists():  # removed by the running process meanwhile: there are newer ones
                    return self.newest(name, set_aside=set_aside)
                if not isinstance(fault, CheckpointDamaged):
                    raise
                log.warning("checkpoint %s is damaged (%s); trying the previous one", folder, fault.why)
                if set_aside:
                    _set_aside(folder)
        return None

    def best_score(self) -> float | None:
        """Mean return of the best policy in its evaluation; None if there is no such policy."""
        found = self.newest("best")
        return None if found is None else found.manifest.notes.get("mean_reward")

    def series(self, name: str = "step") -> list[Path]:
        """Directories of a name, oldest first, valid or not."""
        return [folder for _, folder in sorted(self._numbered(name))]

    def _numbered(self, name: str) -> Iterable[tuple[tuple[int, int], Path]]:
        for folder in self.root.glob(f"{name}-*"):
            if match := re.fullmatch(rf"{name}-(\d+)(?:-(\d+))?", folder.name):
                yield (int(match[1]), int(match[2] or 1)), folder

    def _unused_path(self, name: str, step: int) -> Path:
        """Return a new path for each save, even at the same step: a directory cannot be replaced atomically."""
        taken = [number[1] for number, _ in self._numbered(name) if number[0] == step]
        return self.root / (f"{name}-{step:012d}" + (f"-{max(taken) + 1}" if taken else ""))

    def _write_segment(self, draft: AtomicDirectory, segment: Segment) -> None:
        file = segment.name + SEGMENT
        if not re.fullmatch(FILE_NAME, file):
            raise ValueError(f"{segment.name!r} cannot name a segment")
        before = self._previous
        entry = before.manifest.files.get(file) if before else None
        if before is not None and entry is not None and draft.link(file, before.path / file, entry):
            return
        if segment.source is None or not draft.link_new(file, segment.source):
            draft.write(file, segment.blocks())

    def _rotate(self, name: str, keep: int, written: Path) -> None:
        """Keep the checkpoint that was just written, regardless of its number, and the newest of the others."""
        others = [folder for folder in self.series(name) if folder != written]
        for folder in others[:max(0, len(others) - (keep - 1))]:
            if not discard(folder):
                log.warning("the old checkpoint %s could not be removed", folder)


def _write_policy(
    draft: AtomicDirectory, policy: Mapping[str, torch.Tensor], meta: CheckpointMeta
) -> dict[str, torch.Tensor]:
    """Write policy and config; returns the weights as written."""
    weights = {name: state_tree.dense(value) for name, value in policy.items()}
    draft.write(POLICY, [safetensors.torch.save(weights)])
    draft.write(CONFIG, [_limited(CONFIG, meta.config.encode())])
    return weights


def _shared_arrays(policy: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The policy's arrays, by the names under which the state refers to them."""
    return {f"policy:{name}": value for name, value in policy.items()}


def _seal(
    draft: AtomicDirectory, kind: Literal["full", "policy"], step: int, updates: int, meta: CheckpointMeta
) -> Manifest:
    """Write the manifest last: a directory without one was never completed."""
    manifest = Manifest(
        format_version=FORMAT_VERSION, qfleet=__version__, kind=kind, step=step, updates=updates,
        created=datetime.now().astimezone().isoformat(timespec="seconds"), run=meta.run, env=meta.spec.to_json(),
        notes={name: value if math.isfinite(value) else None for name, value in meta.notes.items()},
        files=dict(draft.files),
    )
    body = manifest.model_dump()
    draft.write(MANIFEST, [_limited(MANIFEST, json.dumps({"sha256": _digest(body), **body}, indent=1).encode())])
    return manifest


def _digest(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _limited(name: str, data: bytes) -> bytes:
    if len(data) > LIMITS[name]:
        raise ValueError(f"{name} would have {len(data):,} bytes, and {LIMITS[name]:,} is the limit: "
                         f"store large state in arrays")
    return data


def _check_size(folder: Path, name: str, size: int | None = None) -> None:
    """Require a regular file (a pipe would block, a link may lead anywhere) of the expected and an allowed size."""
    try:
        found = (folder / name).lstat()
    except OSError as error:
        raise CheckpointDamaged(folder, f"{name} is missing or cannot be read ({error.strerror})") from error
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointDamaged(folder, f"{name} is not a regular file")
    if size is not None and found.st_size != size:
        raise CheckpointDamaged(folder, f"{name} has {found.st_size:,} bytes instead of {size:,}")
    if found.st_size > LIMITS.get(name, DATA_BYTES):
        raise CheckpointDamaged(
            folder, f"{name} has {found.st_size:,} bytes, and {LIMITS.get(name, DATA_BYTES):,} is the limit"
        )


def _read(folder: Path, name: str, size: int | None = None) -> bytes:
    _check_size(folder, name, size)
    try:
        return (folder / name).read_bytes()
    except OSError as error:
        raise CheckpointDamaged(folder, f"{name} cannot be read ({error.strerror})") from error


def _set_aside(folder: Path) -> None:
    aside, number = folder.with_name(f"{folder.name}.corrupt"), 2
    while aside.exists():
        aside, number = folder.with_name(f"{folder.name}.corrupt-{number}"), number + 1
    try:
        folder.rename(aside)
    except OSError as error:
        log.warning("cannot rename %s: %s", folder, error.strerror)
