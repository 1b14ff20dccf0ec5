"""Whether the directory that a run writes to is still there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qfleet.core.errors import RunLost
from qfleet.runs.directory import RunDirectory


class DirectoryGuard:
    """Raises RunLost once the run's directory is deleted, moved or replaced. As a sink it looks with every record.

    Open files go on taking what is written to them after their deletion, and saving would make a directory anew: a run
    would end well, and leave nothing. Errors that do not prove a loss, such as those of a network disk, are no loss.
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
            raise RunLost(self._lost("is gone, or run.json in it")) from None
        except OSError:
            return
        if (found.st_dev, found.st_ino) != self._identity:
            raise RunLost(self._lost("is another directory than at the start"))

    def _lost(self, how: str) -> str:
        return (f"the run directory {self.directory.path} {how}: it was deleted, moved or replaced while the run was "
                "training. Training stops because its results would be lost; start a new run")

    def write(self, record: Mapping[str, Any]) -> None:
        self.check()

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Nothing is held."""
