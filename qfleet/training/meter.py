"""The meter: gathers figures from everybody and hands one record per log period to the sinks."""

from __future__ import annotations

import inspect
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

from qfleet.core.errors import UserError
from qfleet.core.schedule import Progress, Schedule

RECENT = 100


class Sink(Protocol):
    """Where records go: a file, a board, a terminal."""

    def write(self, record: Mapping[str, Any]) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class FunctionSink:
    """A function that is called with every record, as a sink."""

    def __init__(self, function: Callable[[Mapping[str, Any]], object]) -> None:
        self._function = function

    def write(self, record: Mapping[str, Any]) -> None:
        self._function(record)

    def flush(self) -> None:
        """Nothing to flush."""

    def close(self) -> None:
        """Nothing to close."""


def as_sink(sink: Sink | Callable[[Mapping[str, Any]], object]) -> Sink:
    """A sink, or a function as one; UserError now for what would fail in the middle of a training, or after it."""
    if isinstance(sink, type):
        raise UserError(f"sinks: {sink.__name__} is a class: pass an instance, such as {sink.__name__}()")
    name = getattr(sink, "__name__", type(sink).__name__)
    missing = [method for method in ("write", "flush", "close") if not callable(getattr(sink, method, None))]
    if callable(sink) and "write" in missing:
        _require_call(name, sink, "write(record)", {})
        return FunctionSink(sink)
    if missing:
        raise UserError(f"sinks: {name} has no method {' and no '.join(missing)}: a sink has write(record), flush() "
                        "and close(); or pass a function that takes a record")
    found = cast(Sink, sink)
    _require_call(name, found.write, "write(record)", {})
    _require_call(name, found.flush, "flush()")
    _require_call(name, found.close, "close()")
    return found


def _require_call(name: str, function: Callable[..., object], call: str, *arguments: object) -> None:
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise UserError(f"sinks: {name} cannot be called as {call} is: {error}") from None
    except ValueError:  # a builtin may have no signature to look at
        return


class Meter:
    """Means over a log period, counters since the start, and the mean return of the last 100 episodes.

    A record is flat: step, frames, updates, episodes, time_s (training time over all attempts), then tags.
    `gauges` are asked for their figures when a record is made.
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        progress: Callable[[], Progress],
        frames_per_step: int,
        schedule: Schedule,
        gauges: Sequence[Callable[[], Mapping[str, float]]] = (),
    ) -> None:
        self.sinks, self.progress, self.gauges = sinks, progress, gauges
        self.frames_per_step, self.schedule = frames_per_step, schedule
        self.episodes = 0
        self.counters: dict[str, int] = defaultdict(int)
        self._recent: deque[tuple[float, int]] = deque(maxlen=RECENT)
        self._sums: dict[str, tuple[float, int]] = {}
        self._elapsed, self._since = 0.0, time.monotonic()
        self._mark = (0.0, Progress(0, 0))
        self._told: tuple[Progress, dict[str, int]] = (Progress(0, 0), {})
        self._handed: tuple[int, dict[str, int]] = (0, {})

    @property
    def seconds(self) -> float:
        return self._elapsed + time.monotonic() - self._since

    @property
    def recent_return(self) -> float | None:
        """The mean return of the last episodes."""
        return sum(ret for ret, _ in self._recent) / len(self._recent) if self._recent else None

    def write(self, values: Mapping[str, float]) -> None:
        for tag, value in values.items():
            self.add(tag, value, 1)

    def add(self, tag: str, total: float, count: int) -> None:
        """`count` measurements at once, made elsewhere."""
        before, number = self._sums.get(tag, (0.0, 0))
        self._sums[tag] = (before + total, number + count)

    def count(self, name: str, by: int = 1) -> None:
        self.counters[name] += by

    def episode(self, lane: int, ret: float, length: int) -> None:
        self.episodes += 1
        self._recent.append((ret, length))

    def drain(self) -> dict[str, Any]:
        """What has come in since the last time, for another meter to `take`."""
        episodes, counters = self._handed
        self._handed = (self.episodes, dict(self.counters))
        new = self.episodes - episodes
        found = {"sums": {tag: list(pair) for tag, pair in self._sums.items()}, "new": new,
                 "episodes": [list(pair) for pair in list(self._recent)[-min(new, RECENT):]] if new else [],
                 "counters": {name: number - counters.get(name, 0) for name, number in self.counters.items()}}
        self._sums.clear()
        return found

    def merge(self, handed: Mapping[str, Any]) -> None:
        """Add what another meter handed over."""
        for tag, (total, count) in handed["sums"].items():
            self.add(tag, total, count)
        for name, by in handed["counters"].items():
            if by:
                self.count(name, by)
        self.episodes += handed["new"]
        self._recent.extend((ret, length) for ret, length in handed["episodes"])

    def step(self) -> bool:
        """Emit a record when a log period has passed."""
        if self.schedule.due(self.progress()):
            self.emit()
        return False

    def emit(self, extra: Mapping[str, float] = {}) -> None:
        """One record of everything since the last, with what is said beside it."""
        now, seconds = self.progress(), self.seconds
        record: dict[str, Any] = {
            "step": now.steps, "frames": now.steps * self.frames_per_step, "updates": now.updates,
            "episodes": self.episodes, "time_s": round(seconds, 3)}
        record |= self._rates(now, seconds) | {tag: total / n for tag, (total, n) in self._sums.items()}
        if self._recent:
            record["rollout/ep_rew_mean"] = self.recent_return
            record["rollout/ep_len_mean"] = sum(length for _, length in self._recent) / len(self._recent)
        for gauge in self.gauges:
            record |= gauge()
        record |= self.counters | dict(extra)
        self._sums.clear()
        self._told = self._state()
        for sink in self.sinks:
            sink.write(record)

    def finish(self) -> None:
        """The last record, unless nothing has happened since the one before; everything is on the disk afterwards.

        A meter without sinks keeps what came in last: somebody will ask it to `hand_over`.
        """
        if self.sinks and self._state() != self._told:
            self.emit()
        self.flush()

    def _state(self) -> tuple[Progress, dict[str, int]]:
        """What would be news; that messages were carried, as they always are, is none."""
        return self.progress(), {tag: n for tag, n in self.counters.items() if not tag.startswith("wire/")}

    def _rates(self, now: Progress, seconds: float) -> dict[str, float]:
        before, mark = self._mark
        self._mark = (seconds, now)
        if seconds <= before or now.steps <= mark.steps:
            return {}
        span = seconds - before
        return {"time/fps": (now.steps - mark.steps) / span, "time/updates_per_s": (now.updates - mark.updates) / span}

    def flush(self) -> None:
        for sink in self.sinks:
            sink.flush()

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()

    def state_dict(self) -> dict[str, Any]:
        return {"episodes": self.episodes, "counters": dict(self.counters), "seconds": self.seconds,
                "recent": [list(pair) for pair in self._recent]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.episodes = state["episodes"]
        self.counters.update(state["counters"])
        self._recent.extend((ret, length) for ret, length in state["recent"])
        self._elapsed, self._since = state["seconds"], time.monotonic()
        self._handed = (self.episodes, dict(self.counters))
        self._mark = (state["seconds"], self.progress())
        self.schedule.resume(self.progress())
        self._told = self._state()
