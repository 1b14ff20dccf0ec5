"""Memory: once the replay is full, a run takes no more of it."""

import gc
import re
from pathlib import Path

import pytest
from runs import Spy, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
SLACK_BYTES = 12e6


def resident_bytes() -> float:
    return 1024 * float(re.search(r"VmRSS:\s*(\d+) kB", Path("/proc/self/status").read_text())[1])


def run_and_weigh(steps):
    """Resident memory at every record."""
    weights = []

    def weigh(record):
        gc.collect()
        weights.append((record["step"], resident_bytes()))

    train("cartpole", f"total_steps={steps}", "env.lanes=8", "replay.capacity=2000", "replay.samples_per_insert=1",
          "eval.period_steps=2000", "checkpoint.period_steps=2500", f"run.log_period_steps={steps // 50}",
          sinks=[Spy(weigh)])
    return weights


def growth(steps):
    """From the first half, when all is warm, to the end: medians, since a single reading is noise."""
    weights = run_and_weigh(steps)

    def median(first, last):
        return sorted(size for step, size in weights if first <= step / steps < last)[2]
    return median(0.9, 2) - median(0.4, 0.5)


def test_resident_memory_is_flat_once_the_replay_is_full(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert growth(20_000) < SLACK_BYTES


def test_a_leak_would_be_seen(tmp_path, monkeypatch):
    """The same measurement with 8 KB lost per step."""
    from qfleet.roles.actor import Actor

    monkeypatch.chdir(tmp_path)
    lost, land = [], Actor.land

    def leaky(self):
        lost.append(bytearray(8192 * 8))
        return land(self)

    monkeypatch.setattr(Actor, "land", leaky)
    assert growth(5_000) > SLACK_BYTES
