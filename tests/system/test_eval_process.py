"""Evaluations in a separate process of a run that is one process otherwise."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from fleet_runs import FleetRun, processes
from real_runs import ENVIRONMENT, TINY, records, train, weights_hash

from qfleet import api
from qfleet.runs.checkpoint import Checkpoints

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
SEPARATE = ["eval.process=true", "eval.period_steps=200", "run.threads=1"]


def judged(run):
    return [record for record in records(run) if "eval/mean_reward" in record]


def until(ready, fleet, timeout_s=120):
    deadline = time.monotonic() + timeout_s
    while not ready():
        assert fleet.head.poll() is None, fleet.errors.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_training_is_the_same_whoever_judges_it_and_the_last_weights_are_waited_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    inside = train("cartpole", "total_steps=1200", "eval.period_steps=200", "run.name=inside").directory
    separate = train("cartpole", "total_steps=1200", *SEPARATE, "run.name=separate").directory
    assert weights_hash(inside) == weights_hash(separate)
    assert judged(separate)[-1]["eval/updates"] == records(separate)[-1]["updates"]
    assert all(record["eval/seconds"] > 0 for record in judged(separate))
    assert "start 1" in (separate / "logs" / "evaluator.log").read_text()
    assert [words for _, words in processes() if "_member" in words and str(tmp_path) in " ".join(words)] == []
    assert api.resume(separate).already_finished  # nothing is left to do

    api.resume(separate, ["total_steps=2400"])
    assert judged(separate)[-1]["eval/updates"] == records(separate)[-1]["updates"]


def test_whatever_is_handed_out_is_judged_and_nothing_before_training_returns_enough(tmp_path, monkeypatch):
    """The one evaluation of a period begins when the return is there, in the middle of the period."""
    monkeypatch.chdir(tmp_path)
    never = train("cartpole", "total_steps=1200", *SEPARATE, "eval.from_return=1e9", "run.name=never").directory
    last, = judged(never)
    assert last["eval/updates"] == records(never)[-1]["updates"]
    once = train("cartpole", "total_steps=16000", *SEPARATE, "eval.period_steps=8000", "eval.from_return=15",
                 "run.name=once").directory
    first, *_, last = judged(once)
    assert 8000 / 4 < first["eval/updates"] < last["eval/updates"] == records(once)[-1]["updates"]


def test_an_evaluator_that_is_killed_is_replaced(tmp_path):
    with FleetRun("train", "cartpole", *TINY, *SEPARATE, "total_steps=12000", "run.name=x", cwd=tmp_path) as fleet:
        until(lambda: (fleet.run / "metrics.jsonl").exists() and judged(fleet.run), fleet)
        fleet.kill("evaluator")
        assert fleet.head.wait(timeout=150) == 0
        assert "start 2" in (fleet.run / "logs" / "evaluator.log").read_text()
        assert judged(fleet.run)[-1]["eval/updates"] == records(fleet.run)[-1]["updates"]
        assert fleet.everybody() == [] and list(fleet.tmp.iterdir()) == []


def test_what_was_broken_off_is_made_up_for(tmp_path, monkeypatch):
    """Weights that were handed out and not judged when the run was left are owed."""
    monkeypatch.chdir(tmp_path)
    with FleetRun("train", "cartpole", *TINY, *SEPARATE, "eval.period_steps=2000", "eval.episodes=1000000",
                  "total_steps=1000000", "run.name=x", cwd=tmp_path) as fleet:
        until(lambda: (fleet.run / "metrics.jsonl").exists() and records(fleet.run)
              and records(fleet.run)[-1]["step"] > 2500, fleet)
        fleet.head.send_signal(signal.SIGINT)
        assert fleet.head.wait(timeout=60) == 130
    left = Checkpoints(fleet.run / "checkpoints", 1).newest()
    assert left.state()["evaluator"]["process"]["owed"] and not judged(fleet.run)
    end = left.manifest.step + 12_000
    api.resume(fleet.run, ["eval.episodes=2", "eval.period_steps=1000000", f"total_steps={end}"])
    first, last = judged(fleet.run)
    assert left.manifest.updates <= first["eval/updates"] < last["eval/updates"] == records(fleet.run)[-1]["updates"]


MODULE = """
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

class Mine(CartPoleEnv):
    pass

gymnasium.register("Mine-v0", entry_point=Mine, max_episode_steps=200)
"""
SCRIPT = "import sys, qfleet; qfleet.train('cartpole', ['env.id=my_poles:Mine-v0', *sys.argv[1:]])"


def scripted(tmp_path, *words):
    """A script that trains in an environment of a module beside it, called from elsewhere."""
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "my_poles.py").write_text(MODULE)
    (tmp_path / "app" / "train.py").write_text(SCRIPT)
    inherited = {name: value for name, value in ENVIRONMENT.items() if name != "PYTHONPATH"}
    return subprocess.run([sys.executable, "app/train.py", *TINY, "run.name=x", *words], cwd=tmp_path, timeout=120,
                          capture_output=True, text=True, env=inherited | {"PYTHONPATH": os.getcwd()})


@pytest.mark.parametrize("place", [["eval.process=true"], ["actors=1"]])
def test_a_module_beside_the_users_script_is_found_by_all_processes(tmp_path, place):
    done = scripted(tmp_path, "total_steps=600", *place)
    assert done.returncode == 0, done.stderr
    assert judged(tmp_path / "runs" / "x")


def test_an_evaluator_that_cannot_play_ends_the_run_with_a_checkpoint(tmp_path):
    """The environment refuses to be made a third time: for the evaluator."""
    fault = MODULE.replace("class Mine(CartPoleEnv):\n    pass", """class Mine(CartPoleEnv):
    def __init__(self, **words):
        import sys
        if "_member" in sys.argv:
            raise RuntimeError("not here")
        super().__init__(**words)""")
    (tmp_path / "my_poles.py").write_text(fault)
    with FleetRun("train", "cartpole", *TINY, *SEPARATE, "env.id=my_poles:Mine-v0", "total_steps=1000000",
                  "run.name=x", "fleet.actor_restarts=1", cwd=tmp_path, PYTHONPATH=str(tmp_path)) as fleet:
        assert fleet.head.wait(timeout=120) in (1, 2)
        assert "not here" in fleet.errors.read_text()
    assert Checkpoints(fleet.run / "checkpoints", 1).newest() is not None
