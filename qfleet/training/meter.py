"""Metric aggregation: collects the metrics of all workers and writes one record per log period to the sinks."""

from __future__ import annotations

import inspect
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, cast

from qfleet.core.clock import Progress, Schedule
from qfleet.core.episode import Episode
from qfleet.core.errors import CallbackError, UserError
from qfleet.core.tracebacks import raised_text

RECENT_EPISODES = 100
"""Window of mean and spread of the training return, and of the mean episode length."""


class Sink(Protocol):
    """Output for metric records, such as a file, TensorBoard or a terminal."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Receive a record.

        Args:
            record: The clocks `step`, `frames`, `updates`, `episodes` and `time_s`, and values by tag.
        """

    def flush(self) -> None:
        """Write what is buffered."""

    def close(self) -> None:
        """Release files and connections; called once, at the end."""


class FunctionSink:
    """Sink that calls a function with every record."""

    def __init__(self, function: Callable[[Mapping[str, Any]], object]) -> None:
        self._function = function

    @property
    def name(self) -> str:
        return str(getattr(self._function, "__qualname__", type(self._function).__qualname__))

    def write(self, record: Mapping[str, Any]) -> None:
        self._function(record)

    def flush(self) -> None:
        """Do nothing: a function has no buffer."""

    def close(self) -> None:
        """Do nothing: a function holds no resource."""


class GuardedSink:
    """Sink of the user. What it raises becomes a CallbackError, and it receives no more records after that."""

    def __init__(self, sink: Sink) -> None:
        self._sink, self._failed = sink, False

    def write(self, record: Mapping[str, Any]) -> None:
        self._call("write", record)

    def flush(self) -> None:
        self._call("flush")

    def close(self) -> None:
        self._failed = False  # what it holds is to be released all the same
        self._call("close")

    def _call(self, method: str, *arguments: object) -> None:
        if self._failed:
            return
        try:
            getattr(self._sink, method)(*arguments)
        except Exception as error:
            self._failed = True
            sink = self._sink
            name = sink.name if isinstance(sink, FunctionSink) else f"{type(sink).__qualname__}.{method}"
            raise CallbackError(raised_text(f"sink {name}", error)) from error


def as_sink(sink: Sink | Callable[[Mapping[str, Any]], object]) -> Sink:
    """Return a sink unchanged and wrap a function as a sink.

    UserError for an invalid sink, before training starts instead of in the middle of it.
    """
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
        raise UserError(f"sinks: {name} does not accept the call {call}: {error}") from None
    except ValueError:  # some builtins have no signature
        return


class Meter:
    """Collects metrics: means per log period, counters since the start, mean return of the last 100 episodes.

    A record is flat: step, frames, updates, episodes, time_s (training time over all attempts), then tags.
    `gauges` are called whenever a record is emitted. After a sink of the user has failed, `on_failure` is called, which
    ends the run as usual, and `raise_failure` raises the error.
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        progress: Callable[[], Progress],
        frames_per_step: int,
        schedule: Schedule,
        gauges: Sequence[Callable[[], Mapping[str, float]]] = (),
        on_episode: Callable[[Episode], None] = lambda episode: None,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self.sinks, self.progress, self.gauges = sinks, progress, list(gauges)
        self.frames_per_step, self.schedule = frames_per_step, schedule
        self.on_episode, self.latest = on_episode, dict[str, Any]()
        self.on_failure = on_failure
        self._failure: CallbackError | None = None
        self._cause: BaseException | None = None
        self.episodes = 0
        self.counters: dict[str, int] = defaultdict(int)
        self._recent: deque[Episode] = deque(maxlen=RECENT_EPISODES)
        self._sums: dict[str, tuple[float, int]] = {}
        self._logged = False  # since the last record
        self._elapsed = 0.0
        self._since: float | None = time.monotonic()  # None while the clock is stopped
        self._rates_since = (0.0, Progress(0, 0))
        self._emitted: tuple[Progress, dict[str, int]] = (Progress(0, 0), {})
        self._drained: tuple[int, dict[str, int]] = (0, {})

    def add_gauge(self, gauge: Callable[[], Mapping[str, float]]) -> None:
        self.gauges.append(gauge)

    @property
    def seconds(self) -> float:
        """Training time over all attempts, while the clock was not stopped."""
        return self._elapsed + (0.0 if self._since is None else time.monotonic() - self._since)

    def stop_clock(self) -> None:
        """Count no time until `start_clock`: the caller of a run does something else."""
        self._elapsed, self._since = self.seconds, None

    def start_clock(self) -> None:
        if self._since is None:
            self._since = time.monotonic()

    @property
    def recent_return(self) -> float | None:
        """Mean return of the last 100 training episodes; None before the first."""
        return self._recent_returns()[0] if self._recent else None

    def _recent_returns(self) -> tuple[float, float]:
        """Mean and standard deviation of the returns of the recent episodes."""
        mean = sum(episode.reward for episode in self._recent) / len(self._recent)
        # The sum of squares could overflow.
        distance = math.hypot(*(episode.reward - mean for episode in self._recent))
        return mean, distance / math.sqrt(len(self._recent))

    def write(self, values: Mapping[str, float]) -> None:
        for tag, value in values.items():
            self.add(tag, value, 1)

    def log(self, values: Mapping[str, float]) -> None:
        """Add the user's metrics. Unlike others, they are written even if no step or update follows."""
        self.write(values)
        self._logged = True

    def add(self, tag: str, total: float, count: int) -> None:
        """Add `count` values with the given sum, for example from another process."""
        before, number = self._sums.get(tag, (0.0, 0))
        self._sums[tag] = (before + total, number + count)

    def count(self, name: str, by: int = 1) -> None:
        self.counters[name] += by

    def episode(self, episode: Episode) -> None:
        self.episodes += 1
        self._recent.append(replace(episode, final_info=None))  # which may be large
        self.on_episode(episode)

    def drain(self) -> dict[str, Any]:
        """Return everything collected since the last call, as input for another meter's `merge`."""
        episodes, counters = self._drained
        self._drained = (self.episodes, dict(self.counters))
        new = self.episodes - episodes
        recent = list(self._recent)[-min(new, RECENT_EPISODES):] if new else []
        drained = {"sums": {tag: list(pair) for tag, pair in self._sums.items()}, "new": new,
                   "episodes": [[each.reward, each.length, each.lane, each.actor, dict(each.info)] for each in recent],
                   "counters": {name: number - counters.get(name, 0) for name, number in self.counters.items()}}
        self._sums.clear()
        return drained

    def merge(self, drained: Mapping[str, Any]) -> None:
        """Add the metrics drained from another meter."""
        for tag, (total, count) in drained["sums"].items():
            self.add(tag, total, count)
        for name, by in drained["counters"].items():
            if by:
                self.count(name, by)
        self.episodes += drained["new"]
        for fields in drained["episodes"]:
            self._recent.append(episode := Episode(*fields))
            self.on_episode(episode)

    def step(self) -> bool:
        """Emit a record if a log period has passed; never busy, so always False."""
        if self.schedule.due(self.progress()):
            self.emit()
        return False

    def emit(self, extra: Mapping[str, float] = {}) -> None:
        """Write one record of everything since the last one, plus `extra`, to all sinks."""
        now, seconds = self.progress(), self.seconds
        record: dict[str, Any] = {
            "step": now.steps, "frames": now.steps * self.frames_per_step, "updates": now.updates,
            "episodes": self.episodes, "time_s": round(seconds, 3)}
        record |= self._rates(now, seconds) | {tag: total / n for tag, (total, n) in self._sums.items()}
        if self._recent:
            record["rollout/ep_rew_mean"], record["rollout/ep_rew_std"] = self._recent_returns()
            record["rollout/ep_len_mean"] = sum(episode.length for episode in self._recent) / len(self._recent)
        for gauge in self.gauges:
            record |= gauge()
        record |= self.counters | dict(extra)
        self._sums.clear()
        self._emitted, self._logged = self._changes(), False
        self.latest |= record
        self._to_all(lambda sink: sink.write(record))

    def finish(self) -> None:
        """Emit the last record, unless nothing has changed since the previous one, and flush all sinks.

        A meter without sinks emits nothing, so that its metrics stay available to `drain`.
        """
        if self.sinks and (self._logged or self._changes() != self._emitted):
            self.emit()
        self.flush()

    def _changes(self) -> tuple[Progress, dict[str, int]]:
        """Progress and counters that justify another record; those of traffic (wire/) and of time (_ms) do not."""
        return self.progress(), {
            tag: n for tag, n in self.counters.items() if not (tag.startswith("wire/") or tag.endswith("_ms"))}

    def _rates(self, now: Progress, seconds: float) -> dict[str, float]:
        before, then = self._rates_since
        self._rates_since = (seconds, now)
        if seconds <= before or now.steps <= then.steps:
            return {}
        span = seconds - before
        return {"time/fps": (now.steps - then.steps) / span, "time/updates_per_s": (now.updates - then.updates) / span}

    def flush(self) -> None:
        self._to_all(lambda sink: sink.flush())

    @property
    def failed(self) -> bool:
        """True after an exception in a sink of the user."""
        return self._failure is not None

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure from self._cause

    def _to_all(self, call: Callable[[Sink], None]) -> None:
        for sink in self.sinks:
            try:
                call(sink)
            except CallbackError as error:
                if self._failure is not None:
                    continue
                self._failure = CallbackError(f"{error}; the run was stopped at step {self.progress().steps:,}")
                self._cause = error.__cause__
                self.on_failure()

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()

    def state_dict(self) -> dict[str, Any]:
        return {"episodes": self.episodes, "counters": dict(self.counters), "seconds": self.seconds,
                "recent": [[episode.reward, episode.length] for episode in self._recent]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.episodes = state["episodes"]
        self.counters.update(state["counters"])
        self._recent.extend(Episode(reward, length) for reward, length in state["recent"])
        self._elapsed = state["seconds"]
        self._since = None if self._since is None else time.monotonic()
        self._drained = (self.episodes, dict(self.counters))
        self._rates_since = (state["seconds"], self.progress())
        self.schedule.resume(self.progress())
        self._emitted = self._changes()
