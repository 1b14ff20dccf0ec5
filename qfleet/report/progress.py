"""The view of a running training: a live panel on a terminal, one line every few seconds elsewhere, or nothing.

It is a sink like the metric writers, so it sees one record per log period and costs nothing per step. It writes to
stderr: stdout carries results only, and can be piped or closed without disturbing the view or the training.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from qfleet.report.status import BY_ROLE, Record, RunGoal, RunStatus, format_duration

PLAIN_PERIOD_S = 5.0
REFRESH_PER_S = 4
FIGURE_WIDTH = 25
ROLE_WIDTH = 11
SILENCE_S = 30.0
"""Longer than this, and three times longer than usual, without a record: that is worth a word."""


class SafeStream:
    """A text stream whose reader may go away: after the first failed write everything is dropped in silence."""

    encoding = "utf-8"

    def __init__(self, stream: TextIO) -> None:
        self._stream: TextIO | None = stream
        self.encoding = getattr(stream, "encoding", None) or "utf-8"

    @property
    def open(self) -> bool:
        return self._stream is not None

    def write(self, text: str) -> int:
        try:
            if self._stream is not None:
                self._stream.write(text)
        except UnicodeEncodeError:
            self.write(text.encode(self.encoding, "replace").decode(self.encoding))
        except (OSError, ValueError):
            self._stream = None
        return len(text)

    def flush(self) -> None:
        try:
            if self._stream is not None:
                self._stream.flush()
        except (OSError, ValueError):
            self._stream = None

    def isatty(self) -> bool:
        try:
            return self._stream is not None and self._stream.isatty()
        except (OSError, ValueError):
            return False

    def fileno(self) -> int:
        if self._stream is None:
            raise OSError("the stream is closed")
        return self._stream.fileno()


class ProgressRenderer(Protocol):
    """How the tally is shown."""

    def say(self, text: str) -> None: ...
    def show(self, tally: RunStatus, record: Record) -> None: ...
    def end(self, tally: RunStatus) -> None: ...


class SilentRenderer:
    """Shows nothing."""

    def say(self, text: str) -> None:
        """Drop the text."""

    def show(self, tally: RunStatus, record: Record) -> None:
        """Drop the record."""

    def end(self, tally: RunStatus) -> None:
        """Nothing to end."""


class PlainRenderer:
    """One line every few seconds and one per evaluation, for logs, pipes and dumb terminals."""

    def __init__(self, stream: SafeStream, now: Callable[[], float]) -> None:
        self._stream = stream
        self._now = now
        self._last_at: float | None = None
        self._shown: tuple[float, Any] | None = None

    def say(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    def show(self, tally: RunStatus, record: Record) -> None:
        now = self._now()
        evaluated = record.get("eval/mean_reward") is not None
        if evaluated or self._last_at is None or now - self._last_at >= PLAIN_PERIOD_S:
            self._last_at = now
            self._line(tally)

    def end(self, tally: RunStatus) -> None:
        if tally.latest:
            self._line(tally)

    def _line(self, tally: RunStatus) -> None:
        wanted = {"return", "eval", "ε", "loss", "samples/insert", "steps/s", "updates/s", "actors"}
        news = (tally.count("step"), tally.latest.get("eval/mean_reward"))
        if news != self._shown:
            self._shown = news
            figures = [f"{label} {text}" for label, text in tally.metrics() if label in wanted]
            verdict = tally.bottleneck()
            limit = [f"limited by {verdict.limit}"] if verdict is not None else []
            self.say("  ".join([tally.headline(), *figures, *limit]))


class LiveRenderer:
    """A bar and a small table redrawn in place, four times a second by rich's own thread."""

    def __init__(self, console: Console, tally: RunStatus, now: Callable[[], float]) -> None:
        self._console = console
        self._tally = tally
        self._now = now
        self._heard_at = now()
        self._usual_s = 0.0
        self._live: Live | None = None

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(self, tally: RunStatus, record: Record) -> None:
        now = self._now()
        self._usual_s, self._heard_at = max(0.5 * self._usual_s, now - self._heard_at), now
        if self._live is None:
            # Prints of the environment go above the panel, but stdout only where it is this same terminal.
            self._live = Live(get_renderable=self.panel, console=self._console, refresh_per_second=REFRESH_PER_S,
                              redirect_stdout=sys.stdout.isatty(), redirect_stderr=True, vertical_overflow="crop")
            self._live.start()

    def end(self, tally: RunStatus) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def panel(self) -> RenderableType:
        """The headline over a bar over what the roles do, the figures and what limits the run."""
        done = self._tally.goal.fraction(self._tally.latest)
        silent_s = self._now() - self._heard_at
        gone = format_duration(self._tally.count("time_s") + silent_s)
        silence = (
            f"  nothing new for {format_duration(silent_s)}" if silent_s > max(SILENCE_S, 3 * self._usual_s) else ""
        )
        width = min(self._console.width, 4 * FIGURE_WIDTH)
        bar = Table.grid()  # a bar on its own would not end its line
        bar.add_row(ProgressBar(total=1.0, completed=done, width=width))
        return Group(_line(f"{self._tally.headline()}  {gone} gone{silence}"), bar, *self._lines(),
                     self._grid(max(1, width // FIGURE_WIDTH)))

    def _lines(self) -> Iterator[Text]:
        """One line for each role of a fleet, and one for what limits the run; broken where the terminal is narrow."""
        for name, text in self._tally.roles():
            yield Text.assemble((f"{name:<{ROLE_WIDTH}}", "dim"), text)
        if (verdict := self._tally.bottleneck()) is not None:
            yield Text.assemble((f"{'limited by':<{ROLE_WIDTH}}", "dim"), (verdict.limit, "bold"),
                                f": {verdict.evidence}")

    def _grid(self, columns: int) -> Table:
        table = Table.grid(padding=(0, 1))
        for _ in range(columns):
            table.add_column(style="dim", width=14, no_wrap=True)
            table.add_column(style="bold", width=9, no_wrap=True)
        told = BY_ROLE if self._tally.roles() else set()
        figures = [pair for pair in self._tally.metrics() if pair[0] not in told]
        for start in range(0, len(figures), columns):
            table.add_row(*(text for pair in figures[start:start + columns] for text in pair))
        return table


def _line(text: str) -> Text:
    return Text(text, overflow="ellipsis", no_wrap=True)


class ProgressView:
    """A metrics sink that people look at: `plan` before the first step, `write` per record, `close` at the end.

    `mode` is `auto` (by the stream), `live`, `plain` or `silent`.
    """

    def __init__(self, goal: RunGoal, *, stream: TextIO | None = None, mode: str = "auto",
                 now: Callable[[], float] = time.monotonic) -> None:
        self._out = out = SafeStream(stream if stream is not None else sys.stderr)
        self.tally = RunStatus(goal)
        console = Console(file=out)  # type: ignore[arg-type]  # a stream by its methods, not by its class
        if mode == "auto":
            dumb = console.is_dumb_terminal or bool(os.environ.get("CI"))
            mode = "live" if out.isatty() and not dumb else "plain"
        self.run: str | None = None
        self._renderer: ProgressRenderer
        if mode == "live":
            self._renderer = LiveRenderer(console, self.tally, now)
        else:
            self._renderer = PlainRenderer(out, now) if mode == "plain" else SilentRenderer()

    def plan(self, rows: Iterable[tuple[str, str]]) -> None:
        """Show what the run is going to take: (name, text) pairs; the one named `run` is its directory."""
        pairs = list(rows)
        self.run = dict(pairs).get("run", self.run)
        width = max((len(name) for name, _ in pairs), default=0)
        for name, text in pairs:
            self._renderer.say(f"{name:<{width}}  {text}")

    def write(self, record: Record) -> None:
        self.tally.add(record)
        self._renderer.show(self.tally, record)

    @property
    def has_reader(self) -> bool:
        """Whether anybody is left to look on: the reader of a pipe may have gone."""
        return self._out.open

    def catch_up(self, records: Iterable[Record]) -> None:
        """Take in what happened before somebody looked, and show where that leads."""
        record = None
        for record in records:
            self.tally.add(record)
        if record is not None:
            self._renderer.show(self.tally, record)

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        self._renderer.end(self.tally)
