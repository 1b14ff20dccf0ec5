"""Incremental reading of the metrics that another process writes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qfleet.runs.metric_writers import parse_record
from qfleet.runs.safe_open import open_no_follow


class MetricsTail:
    """`new_records()` yields the records added since the last call.

    A resumed run drops records beyond its checkpoint and replaces the file: the records in the new file have been
    read already, and only those that follow are new.
    """

    def __init__(self, path: Path, from_start: bool = False) -> None:
        self._path = path
        self._place: tuple[int, int] | None = None
        self._offset = 0
        if not from_start:
            self._skip()

    def new_records(self) -> Iterator[dict[str, Any]]:
        try:
            with open_no_follow(self._path) as file:
                found = os.fstat(file.fileno())
                if self._place not in (None, (found.st_dev, found.st_ino)) or found.st_size < self._offset:
                    self._skip()
                self._place = (found.st_dev, found.st_ino)
                file.seek(self._offset)
                data = file.read()
        except OSError:  # missing, or a link
            return
        complete = data[:data.rfind(b"\n") + 1]
        self._offset += len(complete)
        yield from (record for record in map(parse_record, complete.splitlines()) if record is not None)

    def _skip(self) -> None:
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return
        self._place, self._offset = (found.st_dev, found.st_ino), found.st_size
