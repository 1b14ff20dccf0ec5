"""Shares of the wall time, measured with a fake clock."""

import pytest

from qfleet.core.clock import Progress, Schedule
from qfleet.training import timers as module
from qfleet.training.meter import Meter
from qfleet.training.timers import TimeShares


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 100.0

        def __call__(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(module, "perf_counter", clock)
    return clock


class Sleeper:
    def __init__(self, clock, seconds):
        self.clock, self.seconds = clock, seconds

    def step(self):
        self.clock.now += self.seconds
        return self.seconds > 0


def test_shares_of_timed_workers_and_of_added_seconds(clock):
    shares = TimeShares()
    first, second = shares.timed("a", Sleeper(clock, 2.0)), shares.timed("a", Sleeper(clock, 1.0))
    third = shares.timed("b", Sleeper(clock, 0.0))
    assert [worker.step() for worker in (first, second, third)] == [True, True, False]
    clock.now += 3.0
    shares.add_seconds("idle", 3.0)
    assert shares() == {"a": 0.5, "b": 0.0, "idle": 0.5}
    clock.now += 4.0
    assert shares() == {"a": 0.0, "b": 0.0, "idle": 0.0}, "only time since the last call counts"


def test_a_record_that_follows_immediately_leaves_its_time_to_the_next(clock):
    shares = TimeShares()
    worker = shares.timed("a", Sleeper(clock, 0.01))
    worker.step()
    assert shares() == {}
    clock.now += 0.09
    assert shares() == {"a": pytest.approx(0.1)}


def test_time_while_the_clock_is_stopped_does_not_count(clock):
    shares = TimeShares()
    worker = shares.timed("a", Sleeper(clock, 2.0))
    worker.step()
    shares.stop_clock()
    clock.now += 50.0
    shares.stop_clock()
    clock.now += 50.0
    assert shares() == {"a": 1.0}
    shares.start_clock()
    shares.start_clock()
    worker.step()
    clock.now += 2.0
    assert shares() == {"a": 0.5}


def test_a_running_step_counts_up_to_now(clock):
    """An evaluation emits its record before its step ends; the time must be counted once, and in that record."""
    shares = TimeShares()
    seen = []

    class Emitting(Sleeper):
        def step(self):
            self.clock.now += 3.0
            seen.append(shares())
            self.clock.now += 1.0
            return True

    worker = shares.timed("a", Emitting(clock, 0))
    clock.now += 1.0
    worker.step()
    clock.now += 1.0
    assert seen == [{"a": 0.75}] and shares() == {"a": 0.5}


def test_time_shares_work_as_a_gauge(clock):
    records = []

    class Sink:
        write = records.append

    shares = TimeShares()
    shares.timed("time/x_share", Sleeper(clock, 1.0)).step()
    meter = Meter([Sink()], lambda: Progress(1, 1), 1, Schedule(1, None), [shares])
    meter.emit()
    assert records[0]["time/x_share"] == 1.0
