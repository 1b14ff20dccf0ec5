"""Weights & Biases, the real library, offline: figures land in the run directory and nothing leaves it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("wandb")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def test_records_are_kept_offline_in_the_run(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    env = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    env |= {"HOME": str(home), "XDG_CACHE_HOME": "", "XDG_CONFIG_HOME": "", "OMP_NUM_THREADS": "1"}
    words = ["train", "cartpole", "total_steps=400", "env.lanes=2", "agent.hidden=[16]", "replay.chunk_steps=8",
             "replay.min_steps=64", "learner.batch_size=8", "replay.samples_per_insert=2", "eval.period_steps=200",
             "eval.episodes=1", "stop_at=null", "run.log_period_steps=100", "run.name=x", "run.wandb=true"]
    done = subprocess.run([sys.executable, "-m", "qfleet", *words, "--quiet"], cwd=tmp_path, env=env, timeout=150,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [log] = (tmp_path / "runs/x/wandb").rglob("*.wandb")
    assert log.parent.name.startswith("offline-run-")
    records = [json.loads(line) for line in (tmp_path / "runs/x/metrics.jsonl").read_text().splitlines()]
    data = log.read_bytes()  # a log of protobuf messages, whose values are JSON texts
    for tag in ("eval/mean_reward", "train/loss", "rollout/ep_rew_mean"):
        values = [record[tag] for record in records if record.get(tag) is not None]
        assert values and data.count(tag.encode()) >= len(values)
        assert all(json.dumps(value).removesuffix(".0")[:8].encode() in data for value in values), tag
    assert b'{"id":"CartPole-v1"' in data, "the configuration is there, too"
    assert [path for path in home.rglob("*") if path.is_file()] == [], "nothing is left in the home directory"
