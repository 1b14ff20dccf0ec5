"""Writers of metric records: JSON lines are the primary copy, TensorBoard and Weights & Biases are views.

A record is a flat dict of the counters `step`, `frames`, `updates`, `episodes`, `time_s`, and metrics by tag, such as
`rollout/ep_rew_mean`. A writer that fails (full disk, lost connection) drops the record, warns at most once a minute
and does not stop the training.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from qfleet.core.errors import UserError
from qfleet.runs.directory import replace_text
from qfleet.runs.safe_open import open_no_follow

log = logging.getLogger(__name__)

COUNTERS = ("step", "frames", "updates", "episodes", "time_s")
"""Keys of every record. Further ones are metrics."""

WARNING_PERIOD_S = 60.0
Record = Mapping[str, Any]


class ThrottledWarning:
    """Warning about lost records of a writer, logged at most once per period."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.lost = 0
        self._silent_until = -math.inf

    def waiting(self) -> bool:
        """True if the last warning is less than a period old."""
        return time.monotonic() < self._silent_until

    def count(self) -> None:
        """Count a record that was not even tried."""
        self.lost += 1

    def add(self, error: BaseException) -> None:
        self.count()
        if not self.waiting():
            self._silent_until = time.monotonic() + WARNING_PERIOD_S
            log.warning("%s: record lost (%s), %d so far; training continues", self.what, error, self.lost)


def moment_of(record: Record) -> tuple[int, int]:
    """Position of a record in the run: steps and updates, since with remote actors updates happen between steps."""
    return record.get("step", 0), record.get("updates", 0)


class JsonlWriter:
    """Appends one line per record. With `resume`, the (step, updates) of a checkpoint, later lines are dropped first.

    A line is written in one call and removed again if the write is incomplete, so the file holds complete lines only.
    """

    def __init__(self, path: Path, resume: tuple[int, int] | None = None) -> None:
        self._warning = ThrottledWarning(str(path))
        if resume is not None:
            self._drop_beyond(path, resume)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        size = os.fstat(self._file).st_size
        # A killed run may have left an incomplete line: end it here, and readers skip it.
        self._prefix = b"\n" if size and os.pread(self._file, 1, size - 1) != b"\n" else b""

    def write(self, record: Record) -> None:
        line = self._prefix + json.dumps({tag: _plain(value) for tag, value in record.items()}).encode() + b"\n"
        end = os.fstat(self._file).st_size
        try:
            written = os.write(self._file, line)
            if written < len(line):
                written += os.write(self._file, line[written:])  # the second call raises the cause
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._file, end)
            self._warning.add(error)
        else:
            self._prefix = b""

    def flush(self) -> None:
        """Sync the lines to disk, for instance before a checkpoint that relies on them."""
        try:
            os.fsync(self._file)
        except OSError as error:
            self._warning.add(error)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _drop_beyond(self, path: Path, moment: tuple[int, int]) -> None:
        if not path.exists():
            return
        lines = path.read_bytes().splitlines()
        kept = [line for line in lines if (record := parse_record(line)) is not None and moment_of(record) <= moment]
        if len(kept) == len(lines):
            return
        try:
            replace_text(path, "".join(line.decode() + "\n" for line in kept))
        except OSError as error:
            log.warning("%s: lines beyond step %d could not be removed (%s)", path, moment[0], error)


RETURN_CHARTS = {"eval/mean_reward": "Return/evaluation", "rollout/ep_rew_mean": "Return/training"}
"""Tag -> second tag in TensorBoard, which sorts capital letters first: the page opens with these two charts."""


class TensorBoardWriter:
    """Scalars by tag over `step`; counters appear as `time/<counter>`. With `resume_step`, later points are purged.

    `header` returns summaries for the beginning of the run, such as its hyper-parameters; they are written once.
    Events are written synchronously: the thread of `SummaryWriter` dies with a traceback on a full disk.
    """

    def __init__(self, folder: Path, resume_step: int | None = None,
                 header: Callable[[], Sequence[Any]] = list) -> None:
        self._folder = folder
        self._header = list if any(folder.glob("events.*")) else header
        self._purge_step = None if resume_step is None else resume_step + 1
        self._warning = ThrottledWarning(str(folder))
        self._file: BinaryIO | None = None
        self._opened = 0

    def write(self, record: Record) -> None:
        if self._warning.waiting():
            self._warning.count()
            return
        try:
            self._write(record)
        except OSError as error:
            self._warning.add(error)
            self.close()  # an incomplete event makes all later ones unreadable: continue in a new file

    def flush(self) -> None:
        """Nothing is buffered: every record is written at once."""

    def close(self) -> None:
        file, self._file = self._file, None
        try:
            if file is not None:
                file.close()
        except OSError as error:
            self._warning.add(error)

    def _write(self, record: Record) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

        if self._file is None:
            self._file = self._open()
            self._append(Event(wall_time=time.time(), file_version="brain.Event:2"))
            if header := self._header():
                self._append(Event(wall_time=time.time(), step=0, summary=Summary(value=header)))
                self._header = list
            if self._purge_step is not None:
                self._append(Event(wall_time=time.time(), step=self._purge_step,
                                   session_log=SessionLog(status=SessionLog.START)))
                self._purge_step = None
        metrics = {tag: _plain(value) for tag, value in record.items() if tag != "step"}
        metrics |= {RETURN_CHARTS[tag]: value for tag, value in metrics.items() if tag in RETURN_CHARTS}
        values = [Summary.Value(tag=f"time/{tag}" if tag in COUNTERS else tag, simple_value=value)
                  for tag, value in metrics.items() if is_number(value)]
        self._append(Event(wall_time=time.time(), step=int(record["step"]), summary=Summary(value=values)))

    def _open(self) -> BinaryIO:
        """Open a new file. TensorBoard reads the files of a folder in the order of their names."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._opened += 1
        name = f"events.out.tfevents.{int(time.time()):010d}.{platform.node()}.{os.getpid()}.{self._opened}"
        return (self._folder / name).open("ab", buffering=0)

    def _append(self, event: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

        RecordWriter(_FullWrites(self._file)).write(event.SerializeToString())


class _FullWrites:
    """An unbuffered file whose `write` writes all bytes or raises."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: bytes) -> None:
        while data:
            data = data[self._file.write(data):]


class WandbWriter:
    """Logs to Weights & Biases, in the run directory and offline unless WANDB_MODE is set."""

    def __init__(self, folder: Path, name: str, config: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UserError("run.wandb=true needs Weights & Biases: pip install 'qfleet[wandb]'") from error
        self._warning = ThrottledWarning("wandb")
        self._run: Any = None
        mode: Any = os.environ.get("WANDB_MODE", "offline")
        if mode == "offline":
            for part in ("cache", "config", "data"):  # the default is the home directory
                os.environ.setdefault(f"WANDB_{part.upper()}_DIR", str(folder.resolve() / "wandb" / part))
        try:
            self._run = wandb.init(project=os.environ.get("WANDB_PROJECT", "qfleet"), name=name, dir=str(folder),
                                   config=dict(config), mode=mode, settings=wandb.Settings(silent=True))
        except Exception as error:  # a failing writer must not stop the training
            self._warning.add(error)

    def write(self, record: Record) -> None:
        if self._run is None:
            return
        try:
            self._run.log({tag: _plain(value) for tag, value in record.items()}, step=int(record["step"]))
        except Exception as error:
            self._warning.add(error)

    def flush(self) -> None:
        """The library sends records asynchronously."""

    def close(self) -> None:
        run, self._run = self._run, None
        if run is None:
            return
        try:
            run.finish()
        except Exception as error:
            self._warning.add(error)


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Read all valid records of a metrics.jsonl, in order; None stands for a value that was not finite."""
    try:
        with open_no_follow(Path(path)) as file:
            lines = file.read().splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    return [record for record in map(parse_record, lines) if record is not None]


def parse_record(line: bytes) -> dict[str, Any] | None:
    """Parse a line; None if it is not a complete record. Values that are not numbers are dropped."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not is_number(record.get("step", 0)):
        return None
    return {tag: value for tag, value in record.items() if is_number(value) or (value is None and "/" in tag)}


def _plain(value: Any) -> Any:
    """Convert a value for JSON: arrays and tensors of one element become numbers, non-finite values become None."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
