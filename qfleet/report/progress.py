"""Progress view of a training: a live panel on a terminal, a line every few seconds elsewhere, or nothing.

The view is a sink like the metric writers: it gets one record per log period and costs nothing per step. It writes to
stderr: stdout is for results only, and can be piped or closed without affecting the view or the training.
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

from qfleet.report.return_gap import GAP_LABEL, REASON, REMEDY
from qfleet.report.status import BY_ROLE, Record, RunGoal, RunStatus, format_duration

PLAIN_PERIOD_S = 5.0
REFRESH_PER_S = 4
METRIC_WIDTH = 25
ROLE_WIDTH = 11
SILENCE_S = 30.0
"""Seconds without a record after which the panel says so, if that is also three times longer than usual."""


class SafeStream:
    """Text stream whose reader may disappear: after the first failed write all further text is dropped."""

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
    """Output of a run's status."""

    def say(self, text: str) -> None: ...
    def show(self, status: RunStatus, record: Record) -> None: ...
    def end(self, status: RunStatus) -> None: ...


class SilentRenderer:
    """Shows nothing."""

    def say(self, text: str) -> None:
        """Drop the text."""

    def show(self, status: RunStatus, record: Record) -> None:
        """Drop the record."""

    def end(self, status: RunStatus) -> None:
        """Nothing to do."""


class PlainRenderer:
    """One line every few seconds and one per evaluation, for logs, pipes and dumb terminals."""

    def __init__(self, stream: SafeStream, now: Callable[[], float]) -> None:
        self._stream = stream
        self._now = now
        self._last_at: float | None = None
        self._shown: tuple[float, Any] | None = None
        self._warned = False

    def say(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    def show(self, status: RunStatus, record: Record) -> None:
        now = self._now()
        evaluated = record.get("eval/mean_reward") is not None
        if evaluated or self._last_at is None or now - self._last_at >= PLAIN_PERIOD_S:
            self._last_at = now
            self._line(status)
        self._warn(status)

    def _warn(self, status: RunStatus) -> None:
        """Say once per occurrence that evaluations return far less than the training."""
        gap = status.return_gap()
        if gap is not None and not self._warned:
            self.say(f"{GAP_LABEL}: {gap.evidence}: {REASON}; {REMEDY}")
        self._warned = gap is not None

    def end(self, status: RunStatus) -> None:
        if status.latest:
            self._line(status)

    def _line(self, status: RunStatus) -> None:
        wanted = {"return", "eval", "ε", "loss", "samples/insert", "steps/s", "updates/s", "actors"}
        current = (status.count("step"), status.latest.get("eval/mean_reward"))
        if current != self._shown:
            self._shown = current
            metrics = [f"{label} {text}" for label, text in status.metrics() if label in wanted]
            bottleneck = status.bottleneck()
            limit = [f"limited by {bottleneck.limit}"] if bottleneck is not None else []
            self.say("  ".join([status.headline(), *metrics, *limit]))


class LiveRenderer:
    """Progress bar and table, redrawn in place four times a second by rich's thread."""

    def __init__(self, console: Console, status: RunStatus, now: Callable[[], float]) -> None:
        self._console = console
        self._status = status
        self._now = now
        self._heard_at = now()
        self._usual_s = 0.0
        self._live: Live | None = None

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(self, status: RunStatus, record: Record) -> None:
        now = self._now()
        self._usual_s, self._heard_at = max(0.5 * self._usual_s, now - self._heard_at), now
        if self._live is None:
            # Output of the environment appears above the panel; stdout only if it is this terminal.
            self._live = Live(get_renderable=self.panel, console=self._console, refresh_per_second=REFRESH_PER_S,
                              redirect_stdout=sys.stdout.isatty(), redirect_stderr=True, vertical_overflow="crop")
            self._live.start()

    def end(self, status: RunStatus) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def panel(self) -> RenderableType:
        """Headline, progress bar, one line per role, the bottleneck and the metrics."""
        done = self._status.goal.fraction(self._status.latest)
        silent_s = self._now() - self._heard_at
        elapsed = format_duration(self._status.count("time_s") + silent_s)
        silence = (
            f"  no record for {format_duration(silent_s)}" if silent_s > max(SILENCE_S, 3 * self._usual_s) else ""
        )
        width = min(self._console.width, 4 * METRIC_WIDTH)
        bar = Table.grid()  # a bar by itself would not end its line
        bar.add_row(ProgressBar(total=1.0, completed=done, width=width))
        return Group(_line(f"{self._status.headline()}  {elapsed} elapsed{silence}"), bar, *self._lines(),
                     self._grid(max(1, width // METRIC_WIDTH)))

    def _lines(self) -> Iterator[Text]:
        """One line per role of a fleet and one for the bottleneck, wrapped on a narrow terminal."""
        for name, text in self._status.roles():
            yield Text.assemble((f"{name:<{ROLE_WIDTH}}", "dim"), text)
        if (bottleneck := self._status.bottleneck()) is not None:
            yield Text.assemble((f"{'limited by':<{ROLE_WIDTH}}", "dim"), (bottleneck.limit, "bold"),
                                f": {bottleneck.evidence}")
        if (gap := self._status.return_gap()) is not None:
            yield Text.assemble((GAP_LABEL, "bold yellow"), f": {gap.evidence}; {REMEDY}")

    def _grid(self, columns: int) -> Table:
        table = Table.grid(padding=(0, 1))
        for _ in range(columns):
            table.add_column(style="dim", width=14, no_wrap=True)
            table.add_column(style="bold", width=9, no_wrap=True)
        shown = BY_ROLE if self._status.roles() else set()
        metrics = [pair for pair in self._status.metrics() if pair[0] not in shown]
        for start in range(0, len(metrics), columns):
            table.add_row(*(text for pair in metrics[start:start + columns] for text in pair))
        return table


def _line(text: str) -> Text:
    return Text(text, overflow="ellipsis", no_wrap=True)


class ProgressView:
    """Metric sink that displays the run: `plan` before the first step, `write` per record, `close` at the end.

    `mode` is `auto` (by the stream), `live`, `plain` or `silent`.
    """

    def __init__(self, goal: RunGoal, *, stream: TextIO | None = None, mode: str = "auto",
                 now: Callable[[], float] = time.monotonic) -> None:
        self._out = out = SafeStream(stream if stream is not None else sys.stderr)
        self.status = RunStatus(goal)
        console = Console(file=out)  # type: ignore[arg-type]  # has the methods of a stream, but not its class
        if mode == "auto":
            dumb = console.is_dumb_terminal or bool(os.environ.get("CI"))
            mode = "live" if out.isatty() and not dumb else "plain"
        self.run: str | None = None
        self._renderer: ProgressRenderer
        if mode == "live":
            self._renderer = LiveRenderer(console, self.status, now)
        else:
            self._renderer = PlainRenderer(out, now) if mode == "plain" else SilentRenderer()

    def plan(self, rows: Iterable[tuple[str, str]]) -> None:
        """Show the plan of the run: (name, text) pairs; the one named `run` is its directory."""
        pairs = list(rows)
        self.run = dict(pairs).get("run", self.run)
        width = max((len(name) for name, _ in pairs), default=0)
        for name, text in pairs:
            self._renderer.say(f"{name:<{width}}  {text}")

    def write(self, record: Record) -> None:
        self.status.add(record)
        self._renderer.show(self.status, record)

    @property
    def has_reader(self) -> bool:
        """True until a write has failed because the terminal or the reader of a pipe is gone."""
        return self._out.open

    def catch_up(self, records: Iterable[Record]) -> None:
        """Add earlier records and show the resulting status once."""
        record = None
        for record in records:
            self.status.add(record)
        if record is not None:
            self._renderer.show(self.status, record)

    def flush(self) -> None:
        """Nothing is buffered."""

    def close(self) -> None:
        self._renderer.end(self.status)
