"""The command line for real: a training from the first step to the film, and signals on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def qfleet(*argv):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    return subprocess.Popen([sys.executable, "-m", "qfleet", *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True, env=env)


def test_the_real_thing_from_training_to_a_film():
    process = qfleet("train", "cartpole", "total_steps=1500", "run.name=x", "--show")
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert out.splitlines()[-1] == "runs/x" and "\x1b" not in out + err
    assert Path("runs/x/plots/learning_curve.png").exists() and list(Path("runs/x/videos").glob("*.mp4"))
    process = qfleet("eval", "x", "--episodes", "2", "--json")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and json.loads(out)["episodes"] == 2, err


@pytest.mark.parametrize("wrappers", ["[]", "[gymnasium.wrappers:RecordEpisodeStatistics]"])
def test_no_emulator_is_left_over_when_the_interpreter_exits(wrappers):
    pytest.importorskip("ale_py")
    process = qfleet("train", "pong", f"env.wrappers={wrappers}", "env.lanes=2", "total_steps=100", "agent.hidden=[16]",
                     "replay.min_steps=32", "replay.chunk_steps=16", "replay.capacity=500", "learner.batch_size=4",
                     "eval.episodes=1", "eval.max_episode_steps=5", "run.name=x")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0 and "100 / 100 steps" in err
    assert "leaked" not in err  # nanobind lists native objects that were never freed


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_saves_and_says_how_to_go_on(number, code):
    process = qfleet("train", "cartpole", "stop_at=null", "run.name=x", "run.log_period_steps=100")
    deadline = time.monotonic() + 60
    while not (Path("runs/x/metrics.jsonl").exists() and Path("runs/x/metrics.jsonl").read_text()):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert out.splitlines()[-1] == "runs/x" and "qfleet resume runs/x\n" in out
