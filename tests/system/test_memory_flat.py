"""Memory: once the replay is full, a run takes no more of it. Measured in a process that holds nothing else."""

import subprocess
import sys
from pathlib import Path

import pytest
from real_runs import ENVIRONMENT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]
SLACK_BYTES = 12e6

SCRIPT = """
import re, sys
from pathlib import Path
from real_runs import Spy, train
from qfleet.actor.actor import Actor

def resident_bytes():
    return 1024 * int(re.search(r"VmRSS:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])

def growth(steps):
    sizes = []
    spy = Spy(lambda record: sizes.append((record["step"] / steps, resident_bytes())))
    train("cartpole", f"total_steps={steps}", "env.lanes=8", "replay.capacity=2000", "replay.samples_per_insert=1",
          "eval.period_steps=2000", "checkpoint.period_steps=2500", f"run.log_period_steps={steps // 50}", sinks=[spy])
    def median(first, last):
        return sorted(size for at, size in sizes if first <= at < last)[2]
    return median(0.9, 2) - median(0.4, 0.5)

flat = growth(20_000)
lost, receive = [], Actor.receive_step

def leaky(self):
    lost.append(bytearray(b"x") * 8192 * self.env.lanes)
    return receive(self)

Actor.receive_step = leaky
print(flat, growth(6_000))
"""


def test_resident_memory_is_flat_once_the_replay_is_full(tmp_path):
    """From the first half, when all is warm, to the end; then the same with 8 KB lost per step, which must show."""
    path = {"PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=tmp_path, capture_output=True, text=True, timeout=170,
                          env=ENVIRONMENT | path)
    assert done.returncode == 0, done.stderr
    flat, leaking = map(float, done.stdout.split())
    assert flat < SLACK_BYTES < leaking
