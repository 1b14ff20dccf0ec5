"""Detection of a run directory that was deleted, moved or replaced during training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qfleet.core.errors import RunLost
from qfleet.runs.directory import RunDirectory


class DirectoryGuard:
    """Raises RunLost once the run directory is deleted, moved or replaced. As a metric sink it checks at every record.

    Deleted files that are still open accept writes, and saving would create the directory again: the run would end
    normally and leave no results. Errors that do not prove a loss, such as those of a network disk, are ignored.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        found = directory.path.stat()
        self._identity = found.st_dev, found.st_ino

    def check(self) -> None:
        try:
            found = self.directory.path.stat()
            self.directory.record.lstat()
        except (FileNotFoundError, NotADirectoryError):
            raise RunLost(self._lost("or its run.json is missing")) from None
        except OSError:
            return
        if (found.st_dev, found.st_ino) != self._identity:
            raise RunLost(self._lost("is not the same directory as at the start"))

    def _lost(self, how: str) -> str:
        return (f"the run directory {self.directory.path} {how}: it was deleted, moved or replaced while the run was "
                "training. Training stops because its results would be lost; start a new run")

    def write(self, record: Mapping[str, Any]) -> None:
        self.check()

    def flush(self) -> None:
        """Nothing is buffered."""

    def close(self) -> None:
        """Nothing is open."""
