"""Metric records: means, counters, rates, episodes, resume."""

import numpy as np
import pytest

from qfleet.core.clock import Progress, Schedule
from qfleet.core.episode import Episode
from qfleet.training import meter as module
from qfleet.training.meter import Meter


class Records(list):
    write = list.append

    def flush(self):
        self.flushed = True

    def close(self):
        self.closed = True


def meter_with(clock, **kwargs):
    records = Records()
    return Meter([records], lambda: clock[0], frames_per_step=4, schedule=Schedule(100, None), **kwargs), records


def test_values_are_averaged_per_period_and_counters_accumulate():
    clock = [Progress(0, 0)]
    meter, records = meter_with(clock, gauges=[lambda: {"replay/size": 7}])
    meter.write({"train/loss": 1.0})
    meter.write({"train/loss": 3.0})
    meter.count("fault/x", 2)
    meter.step()
    assert records == []
    clock[0] = Progress(100, 25)
    meter.step()
    meter.step()
    assert len(records) == 1
    record = records[0]
    assert (record["step"], record["frames"], record["updates"]) == (100, 400, 25)
    assert record["train/loss"] == 2.0 and record["fault/x"] == 2 and record["replay/size"] == 7
    assert record["time/fps"] > 0 and record["time/updates_per_s"] > 0
    clock[0] = Progress(230, 25)
    meter.step()
    assert "train/loss" not in records[1] and records[1]["fault/x"] == 2


def test_seconds_and_rates_leave_out_the_time_while_the_clock_is_stopped(monkeypatch):
    seconds = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: seconds[0])
    clock = [Progress(0, 0)]
    meter, records = meter_with(clock)
    seconds[0] += 2.0
    meter.stop_clock()
    seconds[0] += 500.0
    meter.stop_clock()
    meter.load_state_dict(meter.state_dict())
    seconds[0] += 500.0
    assert meter.seconds == 2.0
    meter.start_clock()
    meter.start_clock()
    seconds[0] += 3.0
    clock[0] = Progress(600, 60)
    meter.emit()
    assert records[0]["time_s"] == 5.0 and records[0]["time/fps"] == 200.0


def test_returns_are_averaged_over_the_last_hundred_episodes():
    clock = [Progress(0, 0)]
    meter, records = meter_with(clock)
    for i in range(150):
        meter.episode(Episode(float(i), 10))
    meter.emit({"eval/mean_reward": 5.0})
    assert records[0]["rollout/ep_rew_mean"] == sum(range(50, 150)) / 100
    assert records[0]["rollout/ep_rew_std"] == pytest.approx(np.std(range(50, 150)))
    assert records[0]["episodes"] == 150 and records[0]["eval/mean_reward"] == 5.0


def test_a_restored_meter_continues_its_counts_and_schedule():
    clock = [Progress(300, 3)]
    meter, _ = meter_with(clock)
    meter.episode(Episode(2.0, 4))
    meter.count("fault/x")
    state = meter.state_dict()
    state["seconds"] = 1000.0
    other, records = meter_with(clock)
    other.load_state_dict(state)
    other.step()
    assert records == []
    clock[0] = Progress(400, 3)
    other.step()
    record = records[0]
    assert record["time_s"] >= 1000 and record["episodes"] == 1 and record["fault/x"] == 1
    assert record["rollout/ep_rew_mean"] == 2.0 and record["time/fps"] > 100


def test_sinks_are_flushed_and_closed():
    meter, records = meter_with([Progress(0, 0)])
    meter.flush()
    meter.close()
    assert records.flushed and records.closed


def test_a_meter_without_sinks_keeps_its_metrics_for_drain():
    meter = Meter([], lambda: Progress(300, 3), frames_per_step=1, schedule=Schedule(100, None))
    meter.write({"train/loss": 1.0})
    meter.finish()
    assert meter.drain()["sums"] == {"train/loss": [1.0, 1]}


def test_time_and_traffic_alone_are_no_reason_for_a_last_record():
    meter, records = meter_with([Progress(300, 3)])
    meter.emit()
    meter.count("server/checkpoint_barrier_ms", 100)
    meter.count("wire/bytes", 5)
    meter.finish()
    assert len(records) == 1
    meter.count("fault/x")
    meter.finish()
    assert len(records) == 2 and records[1]["server/checkpoint_barrier_ms"] == 100
