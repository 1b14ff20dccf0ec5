"""Real runs for tests: in this process where a process is not the point, in others to be killed; and their traces."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from qfleet import api
from qfleet.launch.train_result import TrainResult
from qfleet.runs.checkpoint import Checkpoints

TINY = ["agent.hidden=[16]", "env.lanes=2", "replay.chunk_steps=8", "replay.min_steps=64", "learner.batch_size=8",
        "replay.samples_per_insert=4", "eval.episodes=2", "run.tensorboard=false", "run.log_period_steps=200",
        "run.threads=1", "stop_at=null"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"}
"""Workers of Ray, whoever starts it, do not stand back behind other tests; by default they are 15 nicer."""


def train(source: str, *overrides: str, sinks=()) -> TrainResult:
    """A tiny run in this process, under `runs` of the working directory."""
    return api.train(source, [*TINY, *overrides], sinks=sinks)


class Spy:
    """A sink that keeps all records, and does something with each."""

    def __init__(self, act: Callable[[Mapping[str, Any]], None] = lambda record: None) -> None:
        self.records: list[Mapping[str, Any]] = []
        self.act = act

    def write(self, record: Mapping[str, Any]) -> None:
        self.records.append(dict(record))
        self.act(record)

    def flush(self) -> None: ...

    def close(self) -> None: ...


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "qfleet", *args]


def qfleet(*args: str, cwd: Path, timeout: float = 110, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end."""
    return subprocess.run(command(*args), cwd=cwd, capture_output=True, text=True, timeout=timeout,
                          env=ENVIRONMENT | env)


def open_stores(pid: int) -> list[int]:
    """Ports of a process at which anybody may read and write a store of torch.distributed."""
    links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
    tables = [line.split() for name in ("tcp", "tcp6")
              for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()]
    ports = {int(row[1].rpartition(":")[2], 16) for row in tables if row[3] == "0A" and f"socket:[{row[9]}]" in links}
    found = []
    for port in sorted(ports):
        with suppress(RuntimeError):
            dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=2)).num_keys()
            found.append(port)
    return found


def killed_when(args: list[str], cwd: Path, ready, signum: int = signal.SIGKILL, timeout: float = 110) -> int:
    """Start the command line, send a signal as soon as `ready()` says so, and return the exit code."""
    process = subprocess.Popen(command(*args), cwd=cwd, env=ENVIRONMENT, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)
    try:
        wait_until(ready, process, timeout)
        process.send_signal(signum)
        return process.wait(timeout)
    finally:
        process.kill()
        process.wait()


def wait_until(ready: Callable[[], Any], process: subprocess.Popen, timeout: float = 60) -> None:
    """Wait for something that a living process is to bring about."""
    deadline = time.monotonic() + timeout
    while not ready():
        assert process.poll() is None, f"ended by itself with {process.returncode} before it was due"
        assert time.monotonic() < deadline, "was never ready"
        time.sleep(0.005)


def weights_hash(run: Path) -> str:
    """A fingerprint of the weights in the newest checkpoint."""
    digest = hashlib.sha256()
    for name, value in sorted(newest(run).policy().items()):
        digest.update(name.encode() + value.numpy().tobytes())
    return digest.hexdigest()


def newest(run: Path):
    """The newest valid checkpoint, which there must be."""
    checkpoint = Checkpoints(run / "checkpoints", 9).newest(set_aside=False)
    assert checkpoint is not None, f"{run} has no valid checkpoint"
    return checkpoint


def records(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def assert_no_step_twice(run: Path) -> None:
    """Log records and evaluation records each go forward, across all attempts."""
    for evaluated in (False, True):
        steps = [record["step"] for record in records(run) if ("eval/mean_reward" in record) == evaluated]
        assert steps == sorted(set(steps)), steps
