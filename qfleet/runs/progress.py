"""The view of a running training: a live panel on a terminal, one line every few seconds elsewhere, or nothing.

It is a sink like the metric writers, so it sees one record per log period and costs nothing per step. It writes to
stderr: stdout carries results only, and can be piped or closed without disturbing the view or the training.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

PLAIN_PERIOD_S = 5.0
REFRESH_PER_S = 4
RATE_RECORDS = 10
FIGURE_WIDTH = 25
Record = Mapping[str, Any]


def clock(seconds: float) -> str:
    """Seconds as people read them: `0:42`, `12:05`, `3:07:00`, `2 d 03:07`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour:02}:{minute:02}"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def amount(value: float) -> str:
    """A figure in few characters, whatever its size: `0.0312`, `21.4`, `12,345`, `1.2e+08`."""
    if abs(value) >= 1e8:
        return f"{value:.3g}"
    if abs(value) >= 1000 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.3g}"


def size(count: float) -> str:
    """Bytes with a unit, by 1000: `512 B`, `3.2 MB`."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


FIGURES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("return", "rollout/ep_rew_mean", amount),
    ("eval", "eval/mean_reward", amount),
    ("best eval", "eval/best_reward", amount),
    ("episode steps", "rollout/ep_len_mean", amount),
    ("ε", "rollout/exploration_rate", amount),
    ("loss", "train/loss", amount),
    ("samples/insert", "replay/samples_per_insert", amount),
    ("policy lag", "actor/policy_lag", amount),
    ("replay steps", "replay/size", amount),
    ("replay", "replay/bytes", size),
)
"""Label, tag and format of what is shown, in order of interest; a tag that no record brought is left out."""


@dataclass(frozen=True)
class Goal:
    """Where the run ends: whichever of the two is reached first; None = not limited by it."""

    steps: int | None
    updates: int | None = None

    def fraction(self, record: Record) -> float:
        parts = [float(record.get(name) or 0) / limit
                 for name, limit in (("step", self.steps), ("updates", self.updates)) if limit]
        return min(1.0, max(parts, default=0.0))


class Tally:
    """The newest value of every tag, and the rates over the last few records."""

    def __init__(self, goal: Goal) -> None:
        self.goal = goal
        self.latest: dict[str, Any] = {}
        self._marks: deque[tuple[float, float, float]] = deque(maxlen=RATE_RECORDS)

    def add(self, record: Record) -> None:
        self.latest.update({tag: value for tag, value in record.items() if value is not None})
        if "time_s" in record:
            self._marks.append((float(record["time_s"]), self.count("step"), self.count("updates")))

    def count(self, name: str) -> float:
        return float(self.latest.get(name, 0))

    def rates(self) -> tuple[float | None, float | None]:
        """Steps and updates per second; None before two records at different times."""
        if len(self._marks) < 2 or self._marks[-1][0] <= self._marks[0][0]:
            return None, None
        (t0, s0, u0), (t1, s1, u1) = self._marks[0], self._marks[-1]
        return (s1 - s0) / (t1 - t0), (u1 - u0) / (t1 - t0)

    def seconds_left(self) -> float | None:
        steps_s, updates_s = self.rates()
        left = [(limit - self.count(name)) / rate
                for name, limit, rate in (("step", self.goal.steps, steps_s), ("updates", self.goal.updates, updates_s))
                if limit and rate]
        return max(0.0, min(left)) if left else None

    def figures(self) -> list[tuple[str, str]]:
        steps_s, updates_s = self.rates()
        rates = [("steps/s", steps_s), ("updates/s", updates_s)]
        shown = [(label, form(float(self.latest[tag]))) for label, tag, form in FIGURES if tag in self.latest]
        return shown + [(label, amount(round(rate))) for label, rate in rates if rate is not None]

    def headline(self) -> str:
        """`12,800 / 50,000 steps  26%  0:31 left`."""
        name = "steps" if self.goal.steps else "updates"
        limit = self.goal.steps or self.goal.updates
        done = self.count("step" if self.goal.steps else "updates")
        parts = [f"{done:,.0f} / {limit:,} {name}" if limit else f"{done:,.0f} {name}"]
        parts.append(f"{self.goal.fraction(self.latest):.0%}")
        left = self.seconds_left()
        if left is not None:
            parts.append(f"{clock(left)} left")
        return "  ".join(parts)


class Forgiving:
    """A text stream whose reader may go away: after the first failed write everything is dropped in silence."""

    encoding = "utf-8"

    def __init__(self, stream: TextIO) -> None:
        self._stream: TextIO | None = stream
        self.encoding = getattr(stream, "encoding", None) or "utf-8"

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


class Face(Protocol):
    """How the tally is shown."""

    def say(self, text: str) -> None: ...
    def show(self, tally: Tally, record: Record) -> None: ...
    def end(self, tally: Tally) -> None: ...


class SilentFace:
    """Shows nothing."""

    def say(self, text: str) -> None:
        """Drop the text."""

    def show(self, tally: Tally, record: Record) -> None:
        """Drop the record."""

    def end(self, tally: Tally) -> None:
        """Nothing to end."""


class PlainFace:
    """One line every few seconds and one per evaluation, for logs, pipes and dumb terminals."""

    def __init__(self, stream: Forgiving, now: Callable[[], float]) -> None:
        self._stream = stream
        self._now = now
        self._last_at: float | None = None
        self._shown: tuple[float, Any] | None = None

    def say(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    def show(self, tally: Tally, record: Record) -> None:
        now = self._now()
        evaluated = record.get("eval/mean_reward") is not None
        if evaluated or self._last_at is None or now - self._last_at >= PLAIN_PERIOD_S:
            self._last_at = now
            self._line(tally)

    def end(self, tally: Tally) -> None:
        if tally.latest:
            self._line(tally)

    def _line(self, tally: Tally) -> None:
        wanted = {"return", "eval", "ε", "loss", "samples/insert", "steps/s", "updates/s"}
        news = (tally.count("step"), tally.latest.get("eval/mean_reward"))
        if news != self._shown:
            self._shown = news
            figures = [f"{label} {text}" for label, text in tally.figures() if label in wanted]
            self.say("  ".join([tally.headline(), *figures]))


class LiveFace:
    """A bar and a small table redrawn in place, four times a second by rich's own thread."""

    def __init__(self, console: Console, tally: Tally, now: Callable[[], float]) -> None:
        self._console = console
        self._tally = tally
        self._now = now
        self._started = now()
        self._live: Live | None = None

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(self, tally: Tally, record: Record) -> None:
        if self._live is None:
            # Prints of the environment go above the panel, but stdout only where it is this same terminal.
            self._live = Live(get_renderable=self.panel, console=self._console, refresh_per_second=REFRESH_PER_S,
                              redirect_stdout=sys.stdout.isatty(), redirect_stderr=True, vertical_overflow="crop")
            self._live.start()

    def end(self, tally: Tally) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def panel(self) -> RenderableType:
        """The headline over a bar over the figures, in as many columns as the terminal is wide."""
        done = self._tally.goal.fraction(self._tally.latest)
        head = Text(f"{self._tally.headline()}  {clock(self._now() - self._started)} gone", overflow="ellipsis",
                    no_wrap=True)
        width = min(self._console.width, 4 * FIGURE_WIDTH)
        bar = Table.grid()  # a bar on its own would not end its line
        bar.add_row(ProgressBar(total=1.0, completed=done, width=width))
        return Group(head, bar, self._grid(max(1, width // FIGURE_WIDTH)))

    def _grid(self, columns: int) -> Table:
        table = Table.grid(padding=(0, 1))
        for _ in range(columns):
            table.add_column(style="dim", width=14, no_wrap=True)
            table.add_column(style="bold", width=9, no_wrap=True)
        figures = self._tally.figures()
        for start in range(0, len(figures), columns):
            table.add_row(*(text for pair in figures[start:start + columns] for text in pair))
        return table


class ProgressView:
    """A metrics sink that people look at: `plan` before the first step, `write` per record, `close` at the end.

    `mode` is `auto` (by the stream), `live`, `plain` or `silent`.
    """

    def __init__(self, total_steps: int | None, total_updates: int | None = None, *, stream: TextIO | None = None,
                 mode: str = "auto", now: Callable[[], float] = time.monotonic) -> None:
        out = Forgiving(stream if stream is not None else sys.stderr)
        self.tally = Tally(Goal(total_steps, total_updates))
        console = Console(file=out)  # type: ignore[arg-type]  # a stream by its methods, not by its class
        if mode == "auto":
            dumb = console.is_dumb_terminal or bool(os.environ.get("CI"))
            mode = "live" if out.isatty() and not dumb else "plain"
        self.run: str | None = None
        self._face: Face
        if mode == "live":
            self._face = LiveFace(console, self.tally, now)
        else:
            self._face = PlainFace(out, now) if mode == "plain" else SilentFace()

    def plan(self, rows: Iterable[tuple[str, str]]) -> None:
        """Show what the run is going to take: (name, text) pairs; the one named `run` is its directory."""
        pairs = list(rows)
        self.run = dict(pairs).get("run", self.run)
        width = max((len(name) for name, _ in pairs), default=0)
        for name, text in pairs:
            self._face.say(f"{name:<{width}}  {text}")

    def write(self, record: Record) -> None:
        self.tally.add(record)
        self._face.show(self.tally, record)

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        self._face.end(self.tally)
