"""Real runs in parallel processes: seeds of `train --jobs`, and trials of `tune`, interrupted and continued."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from real_runs import TINY

from qfleet.cli.commands import main
from qfleet.runs.directory import RunDirectory
from qfleet.runs.metric_writers import read_metrics
from qfleet.runs.run_state import run_state

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

FRAGILE = '''
import gymnasium


class Fragile(gymnasium.Env):
    """Ends its episodes after 5 steps; raises in the first step if it is to fail."""

    observation_space = gymnasium.spaces.Box(0, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, fails=False):
        self.fails = fails

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        if self.fails:
            raise ValueError("the arm has come off")
        self.steps += 1
        return self.observation_space.sample(), 1.0, self.steps == 5, False, {}
'''


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def interrupt_when(condition):
    """Send this process SIGINT as soon as a condition holds."""
    def wait():
        until = time.monotonic() + 120
        while not condition() and time.monotonic() < until:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=wait, daemon=True).start()


def test_seeds_in_parallel_end_with_a_summary_and_equal_seeds_one_by_one(capsys):
    words = ["cartpole", *TINY, "total_steps=300", "stop_at=1", "run.tensorboard=false", "--seeds", "2"]
    assert main(["train", *words, "--jobs", "2", "run.name=p"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[-1] == "runs/p-s2" and any(
        line.startswith("2 of 2 seeds, score of the best policies, fresh episodes: mean")
        and ", best evaluation mean" in line for line in lines)
    assert "2 of 2 solved (stop_at=1)" in out and err.count("seed 1: ") == 1 == err.count("seed 2: ")
    assert main(["train", *words, "run.name=q", "--quiet"]) == 0
    for seed in (1, 2):
        here, there = (read_metrics(f"runs/{name}-s{seed}/metrics.jsonl") for name in "pq")
        losses = [[record["train/loss"] for record in records if "train/loss" in record] for records in (here, there)]
        assert losses[0] == losses[1] != []


def test_ctrl_c_stops_and_saves_all_seeds(capsys):
    interrupt_when(lambda: Path("runs/x-s1/metrics.jsonl").exists() and Path("runs/x-s2/metrics.jsonl").exists())
    assert main(["train", "cartpole", *TINY, "total_steps=10_000_000", "--seeds", "3", "--jobs", "2", "run.name=x",
                 "run.log_period_steps=50", "--json"]) == 130
    documents = json.loads(capsys.readouterr().out)
    assert [Path(document["directory"]).name for document in documents] == ["x-s1", "x-s2"], "the third never started"
    assert all(document["saved_at"] == document["steps"] for document in documents)
    run = RunDirectory(Path("runs/x-s1"))
    assert run_state(run) == "interrupted" and run.attempts()[0]["command"] == sys.argv


def test_a_trial_that_crashes_is_recorded_with_its_error(place, capsys):
    Path("fragile.py").write_text(FRAGILE)
    assert main(["tune", "fragile:Fragile", "env.kwargs.fails=true,false", *TINY[:-1], "total_steps=300", "--sampler",
                 "grid", "--jobs", "2", "--study", "s", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    found = {trial["settings"]["env.kwargs.fails"]: trial for trial in document["trials"]}
    assert (found[True]["state"], found[False]["state"]) == ("failed", "complete")
    assert "the arm has come off" in found[True]["error"] and found[False]["score"] == 5.0
    assert run_state(RunDirectory(Path("s") / found[True]["run"])) == "failed"
    assert main(["config", "show", "s/best.yaml"]) == 0 and "fails: false" in capsys.readouterr().out


def test_an_interrupted_study_continues_its_trial(capsys):
    words = ["tune", "cartpole", *TINY[:-1], "agent.n_step=1..2", "--trials", "1", "--study", "s"]
    interrupt_when(lambda: any("eval/mean_reward" in record for record in read_metrics("s/trial-000/metrics.jsonl")))
    assert main([*words, "total_steps=6000"]) == 130
    assert "continue   qfleet tune --resume s" in capsys.readouterr().out
    steps = RunDirectory(Path("s/trial-000")).checkpoints.glob("step-*")
    assert [path.name for path in steps] != [], "its state is saved"
    assert main(["tune", "--resume", "s", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [(trial["run"], trial["state"]) for trial in document["trials"]] == [("trial-000", "complete")]
    assert len(RunDirectory(Path("s/trial-000")).attempts()) == 2
    assert [record["step"] for record in read_metrics("s/trial-000/metrics.jsonl")][-1] >= 6000
