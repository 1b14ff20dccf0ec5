"""Progress of a study: a line per event on stderr, and on a terminal a line with the trials in progress."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from qfleet.report.progress import SafeStream
from qfleet.report.status import format_duration, format_number
from qfleet.tuning.results import format_value
from qfleet.tuning.trials import ActiveTrial

PLAIN_PERIOD_S = 30.0
"""Seconds between lines about evaluations, where they are printed line by line."""


class SilentStudyView:
    """Shows nothing."""

    def started(self, trial: ActiveTrial) -> None: ...
    def evaluated(self, trial: ActiveTrial, score: float) -> None: ...
    def ended(self, trial: ActiveTrial, state: str, text: str) -> None: ...
    def say(self, text: str) -> None: ...
    def close(self) -> None: ...


class StudyView:
    """Lines about a study of `trials` trials, of which `done` have ended, with a best score or None."""

    def __init__(self, trials: int, done: int = 0, best: float | None = None, stream: TextIO | None = None,
                 now: Callable[[], float] = time.monotonic) -> None:
        self.trials, self.done, self.best = trials, done, best
        self._stream = SafeStream(sys.stderr if stream is None else stream)
        self._now, self._shown_at = now, now()
        self._active: dict[int, str] = {}
        console = Console(file=self._stream, highlight=False, soft_wrap=True)  # type: ignore[arg-type]
        plain = not self._stream.isatty() or console.is_dumb_terminal or bool(os.environ.get("CI"))
        self._live = None if plain else Live(console=console, auto_refresh=False, transient=True)
        if self._live is not None:
            self._live.start()

    def started(self, trial: ActiveTrial) -> None:
        settings = "  ".join(f"{key}={format_value(value)}" for key, value in trial.settings.items())
        self._active[trial.number] = "no evaluation yet"
        self.say(f"trial {trial.number} started: {settings}")

    def evaluated(self, trial: ActiveTrial, score: float) -> None:
        text = f"evaluation {trial.reported}: {format_number(score)}"
        self._active[trial.number] = text
        if self._live is not None:
            self._refresh()
        elif self._now() - self._shown_at >= PLAIN_PERIOD_S:
            self.say(f"trial {trial.number}  {text}")

    def ended(self, trial: ActiveTrial, state: str, text: str) -> None:
        self._active.pop(trial.number, None)
        if text == "interrupted":
            self.say(f"trial {trial.number} interrupted")
            return
        self.done += 1
        if state == "COMPLETE":
            score = sum(trial.scores) / len(trial.scores)
            is_best = self.best is None or score > self.best
            self.best = score if self.best is None else max(score, self.best)
            best = "the best so far" if is_best else f"best {format_number(self.best)}"
            text = f"score {format_number(score)} ({best}), {trial.steps:,} steps in {format_duration(trial.seconds)}"
        else:
            text = f"pruned {text}" if state == "PRUNED" else f"failed: {text}"
        self.say(f"trial {trial.number} ({self.done} of {self.trials}): {text}")

    def say(self, text: str) -> None:
        """Print a line."""
        self._shown_at = self._now()
        if self._live is not None:
            self._live.console.print(Text(text))
            self._refresh()
        else:
            self._stream.write(text + "\n")
            self._stream.flush()

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()

    def _refresh(self) -> None:
        assert self._live is not None
        running = "   ".join(f"trial {number}: {text}" for number, text in self._active.items())
        self._live.update(Text(running, style="dim", no_wrap=True, overflow="ellipsis"), refresh=True)
