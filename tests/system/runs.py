"""Real runs in real processes, for tests: start them, kill them, compare their weights."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from qfleet.runs.checkpoint import Checkpoints

TINY = ["agent.hidden=[16]", "env.lanes=2", "replay.chunk_steps=8", "replay.min_steps=64", "learner.batch_size=8",
        "replay.samples_per_insert=4", "eval.episodes=2", "run.tensorboard=false", "run.log_period_steps=200",
        "stop_at=null"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def qfleet(*args: str, cwd: Path, timeout: float = 110) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end."""
    return subprocess.run([sys.executable, "-m", "qfleet", *args], cwd=cwd, capture_output=True, text=True,
                          timeout=timeout, env=ENVIRONMENT)


def killed_when(args: list[str], cwd: Path, ready, signum: int = signal.SIGKILL, timeout: float = 60) -> int:
    """Start the command line, send a signal as soon as `ready()` says so, and return the exit code."""
    process = subprocess.Popen([sys.executable, "-m", "qfleet", *args], cwd=cwd, env=ENVIRONMENT,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + timeout
        while not ready():
            if process.poll() is not None:
                raise AssertionError(f"ended by itself with {process.returncode} before it could be killed")
            if time.monotonic() > deadline:
                raise AssertionError("was never ready to be killed")
            time.sleep(0.005)
        process.send_signal(signum)
        return process.wait(timeout)
    finally:
        process.kill()
        process.wait()


def weights_hash(run: Path) -> str:
    """A fingerprint of the weights in the newest checkpoint."""
    checkpoint = Checkpoints(run / "checkpoints", 9).newest()
    assert checkpoint is not None, f"{run} has no valid checkpoint"
    digest = hashlib.sha256()
    for name, value in sorted(checkpoint.policy().items()):
        digest.update(name.encode() + value.numpy().tobytes())
    return digest.hexdigest()


def records(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
