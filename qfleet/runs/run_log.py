"""The text log of a run, `logs/run.log`: start and resume, evaluations and warnings with their times, one line each.

Child processes have log files of their own in the same folder.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from qfleet.runs.safe_open import open_folder_no_follow, open_no_follow

PACKAGE = "qfleet"
FOLDER, NAME = "logs", "run.log"
APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
"""Flags of the log: a resumed run may come from elsewhere and contain a link or a pipe of this name."""

TAIL_BYTES = 16 * 1024
"""Bytes at the end of a log file that `log_tail` reads."""


class RunLog:
    """Appends lines to `logs/run.log`: a sink for evaluations, and a logging handler for warnings of this process.

    A line that cannot be written is dropped: the metric writers warn of a full disk. Warnings still appear on stderr,
    unless the program has configured logging.
    """

    def __init__(self, folder: Path, resumed_from: str | None = None) -> None:
        self._folder = folder / FOLDER
        self._handler = _Warnings(self)
        logging.getLogger(PACKAGE).addHandler(self._handler)
        self.append("started" if resumed_from is None else f"resumed from {resumed_from}")

    def write(self, record: Mapping[str, Any]) -> None:
        mean, best = record.get("eval/mean_reward"), record.get("eval/best_reward")
        if mean is None:
            return
        highest = "" if best is None else f", best so far {float(best):.4g}"
        self.append(f"step {int(record['step']):,}: evaluation {float(mean):.4g}{highest}")

    def append(self, text: str) -> None:
        """Append a line with the time. Line breaks in `text` are kept, indented."""
        lines = text.replace("\n", "\n    ")
        with suppress(OSError):
            self._folder.mkdir(exist_ok=True)
            with open_folder_no_follow(self._folder) as inside:
                file = os.open(NAME, APPEND, 0o666, dir_fd=inside)
            with open(file, "a", encoding="utf-8", errors="replace") as stream:
                stream.write(f"{datetime.now():%Y-%m-%d %H:%M:%S}  {lines}\n")

    def flush(self) -> None:
        """Every line is written at once."""

    def close(self) -> None:
        logging.getLogger(PACKAGE).removeHandler(self._handler)


class _Warnings(logging.Handler):
    """Passes log messages to a `RunLog`, and to stderr if nothing else handles them."""

    def __init__(self, log: RunLog) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._log.append(f"{record.levelname.lower()}: {self.format(record)}")
        except Exception:  # as all handlers do: logging never raises into the program
            self.handleError(record)
        handlers = [*logging.getLogger(PACKAGE).handlers, *logging.getLogger().handlers]
        fallback = logging.lastResort  # Python uses it only if there is no handler at all
        if fallback and record.levelno >= fallback.level and handlers[0] is self and all(
                isinstance(each, _Warnings) for each in handlers):
            fallback.handle(record)


def log_names(folder: Path) -> list[str]:
    """Names of the log files of a run without their suffix; the run's own log is first."""
    try:
        with open_folder_no_follow(folder / FOLDER) as inside:
            names = sorted(name.removesuffix(".log") for name in os.listdir(inside) if name.endswith(".log"))
    except OSError:
        return []
    own = NAME.removesuffix(".log")
    return sorted(names, key=lambda name: name != own)


def log_tail(folder: Path, name: str, most: int) -> list[str]:
    """Return the last lines of a log that `log_names` returned; empty if it is gone or a link."""
    try:
        with (open_folder_no_follow(folder / FOLDER) as inside,
              open_no_follow(folder / FOLDER / f"{name}.log", inside) as file):
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - TAIL_BYTES))
            lines = file.read(TAIL_BYTES).decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    if size > TAIL_BYTES and len(lines) > 1:  # the first line is incomplete
        del lines[0]
    return lines[-most:]
