"""The result of a training run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qfleet.core.final_score import FinalScore


@dataclass(frozen=True)
class TrainResult:
    """Result of a training run. It can be passed wherever the path of a run is expected.

    Attributes:
        directory: Run directory.
        steps: Environment steps, over all attempts of the run.
        updates: Updates.
        episodes: Finished training episodes.
        seconds: Duration of the training.
        best: Mean return of the best evaluation during the training. It is a maximum, and thus biased upwards.
        reason: Why the training ended: `total_steps`, `total_updates`, `stop_at`, `stopped`, `preempted` or
            `interrupted`.
        exit_code: Exit code of the command line: 0, 1 if the last checkpoint could not be saved, 75 after a signal of a
            scheduler, 130 after Ctrl-C.
        saved_at: Step of the checkpoint to resume from; None if there is none.
        already_finished: The run had ended before it was resumed, and nothing was done.
        score: Score of the best policy over fresh episodes; None if it was not played.
    """

    directory: Path
    steps: int
    updates: int
    episodes: int
    seconds: float
    best: float | None
    reason: str
    exit_code: int
    saved_at: int | None = None
    already_finished: bool = False
    score: FinalScore | None = None

    def to_json(self) -> dict[str, Any]:
        """Convert the result for `json.dumps`.

        Returns:
            All attributes, with paths as text.
        """
        return asdict(self) | {"directory": str(self.directory)}

    @classmethod
    def from_json(cls, found: Mapping[str, Any], directory: Path | None = None) -> TrainResult:
        """Read a result that was converted by `to_json`.

        Args:
            found: Attributes of the result.
            directory: Path of the run as this process sees it; None = as stored.

        Returns:
            The result.
        """
        path = Path(found["directory"]) if directory is None else directory
        return cls(**{**found, "directory": path, "score": FinalScore.from_json(found.get("score"))})

    def __fspath__(self) -> str:
        """Path of the run, so that a result can be passed wherever a run is named."""
        return str(self.directory)
