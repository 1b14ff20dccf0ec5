"""`top` and `doctor RUN`: what they say of a run that trains, has ended, died, or has not begun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from qfleet.cli import top
from qfleet.cli.commands import main
from qfleet.runs.directory import RunDirectory
from qfleet.runs.lock import LockOwner
from qfleet.runs.run_state import run_state

CONFIG = "seed: 1\ntotal_steps: 4000\nenv:\n  id: CartPole-v1\nreplay:\n  samples_per_insert: 8.0\n"


def record(step, **tags):
    busy = {"actor/env_ms": 1.0, "actor/act_ms": 2.0, "actor/store_ms": 0.0, "actor/wait_ms": 7.0,
            "train/sample_ms": 0.5, "train/update_ms": 2.0, "time/learner_share": 0.9, "time/idle_share": 0.04,
            "fleet/backpressure_share": 0.8, "fleet/actors": 3.0, "fleet/policy_lag": 42.0,
            "replay/samples_per_insert": 7.9,
            "replay/bytes": 5.4e6}
    return {"step": step, "updates": step // 2, "episodes": 7, "time_s": step / 1000, **busy, **tags}


class Run:
    """A run directory that the test writes; `lock` says who owns it."""

    def __init__(self, path: Path):
        self.path = path
        path.mkdir(parents=True)
        (path / "config.yaml").write_text(CONFIG)

    def write(self, *records):
        with (self.path / "metrics.jsonl").open("a") as file:
            file.writelines(json.dumps(each) + "\n" for each in records)

    def lock(self, owner):
        (self.path / "lock").write_text(f"{owner}\n")


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(top, "POLL_S", 0.01)
    return Run(tmp_path / "runs" / "x")


DEAD = LockOwner(LockOwner.current().host, 2**22 + 1, "")
FAR = LockOwner("far.away", 1, "")


@pytest.mark.parametrize(("owner", "state"), [(None, "ended"), (DEAD, "died"), (FAR, "elsewhere"),
                                              (LockOwner.current(), "running"), ("nonsense", "ended")])
def test_the_lock_tells_whether_a_run_goes_on(run, owner, state):
    if owner is not None:
        run.lock(owner)
    assert run_state(RunDirectory(run.path)) == state


RESUME = "; `qfleet resume` starts it again, there is no checkpoint yet"


@pytest.mark.parametrize(("ended", "state", "words"), [
    (None, "died", f"is not running: its process died{RESUME}"),
    ({"reason": "total_steps"}, "ended", "has ended"), ({"reason": "stop_at"}, "ended", "has ended"),
    ({"reason": "stopped"}, "stopped", f"was stopped by the program or a callback{RESUME}"),
    ({"reason": "interrupted"}, "interrupted", f"was interrupted{RESUME}"),
    ({"reason": "preempted"}, "interrupted", f"was interrupted{RESUME}"),
    ({"reason": "failed", "error": "Pruned: a \x1b[31mword"}, "failed", f"has failed: Pruned: a  [31mword{RESUME}"),
    ({"reason": 3, "error": []}, "ended", "has ended")])
@pytest.mark.parametrize("lock", [None, DEAD], ids=["unlocked", "stale lock"])
def test_a_run_that_does_not_go_on_says_how_it_ended(run, capsys, lock, ended, state, words):
    """A resume that failed removes the stale lock; the run counts as crashed all the same."""
    (run.path / "run.json").write_text(json.dumps({"attempts": [{}], "ended": ended}))
    if lock is not None:
        run.lock(lock)
    run.write(record(1000))
    assert main(["top", "x", "--json"]) == 0 and json.loads(capsys.readouterr().out)["state"] == state
    assert main(["top", "x", "--once"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"runs/x {words}"
    assert main(["doctor", "x"]) == 0 and words in capsys.readouterr().out
    assert main(["report", "x", "-o", "page.html"]) == 0 and json.dumps(words)[1:-1] in Path("page.html").read_text()


def test_once_says_where_the_run_stands(run, capsys):
    run.write(record(1000, **{"eval/mean_reward": 12.5, "eval/best_reward": 13.0}), record(2000))
    assert main(["top", "x", "--once"]) == 0
    out, err = capsys.readouterr()
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert err == "" and lines[:2] == ["runs/x has ended", "2,000 / 4,000 steps 50%"]
    assert lines[2].startswith("actors 3 alive 1,000 steps/s env 10 %, inference 20 %")
    assert "evaluator 12.5 best 13 0:01 ago" in lines and lines[-1].startswith("advice a GPU (device=cuda)")
    assert sum(line.startswith("actors") for line in lines) == 1, "what the roles say is not said again"


def test_json_is_one_snapshot(run, capsys):
    run.write(record(1000), record(2000))
    run.lock(LockOwner.current())
    assert main(["top", str(run.path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["state"] == "running" and document["fraction"] == 0.5 and document["seconds_left"] == 2.0
    assert document["limit"]["limit"] == "learner" and document["latest"]["fleet/actors"] == 3
    assert (document["steps_per_s"], document["updates_per_s"], document["samples_per_insert"]) == (1000, 500, 8.0)


def test_a_run_without_records(run, capsys):
    assert main(["top", "x", "--once"]) == 0 and "no records yet" in capsys.readouterr().out
    assert main(["top", "x", "--json"]) == 0 and json.loads(capsys.readouterr().out)["limit"] is None
    assert main(["top", "x"]) == 0 and capsys.readouterr().out.splitlines()[-1] == "runs/x has ended"
    (run.path / "config.yaml").unlink()
    (run.path / "run.json").write_text("{}")
    assert main(["top", "x", "--once"]) == 0


def test_no_such_run_is_a_mistake(run, capsys):
    assert main(["top", "y"]) == 2 and "no run 'y'" in capsys.readouterr().err
    assert main(["top", "x", "--root", "elsewhere"]) == 2
    assert main(["top"]) == 2


@pytest.mark.parametrize(("owner", "words"), [(None, "has ended"), (DEAD, "its process died")])
def test_of_a_run_that_is_over_the_last_state_is_shown(run, capsys, owner, words):
    run.write(record(1000), record(4000))
    if owner is not None:
        run.lock(owner)
    assert main(["top", "x"]) == 0
    first, line, last = capsys.readouterr().out.splitlines()
    assert words in first and words in last and line.startswith("4,000 / 4,000 steps  100%")
    assert line.endswith("limited by learner")


@pytest.mark.timeout(20)
def test_a_run_is_followed_until_its_lock_is_gone(run, capsys):
    run.write(record(1000))
    run.lock(LockOwner.current())

    def train():
        for step in (2000, 3000, 4000):
            time.sleep(0.1)
            run.write(record(step, **{"eval/mean_reward": step / 1000}))
        (run.path / "lock").unlink()

    thread = threading.Thread(target=train)
    thread.start()
    assert main(["top", "x"]) == 0
    thread.join()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" ")[0] for line in lines[1:-1]] == ["1,000", "2,000", "3,000", "4,000"]
    assert lines[0].endswith("is running") and lines[-1].endswith("has ended")


@pytest.mark.timeout(20)
def test_a_viewer_may_leave_and_that_is_no_failure(run, monkeypatch, capsys):
    run.lock(LockOwner.current())
    run.write(record(1000))

    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(top.time, "sleep", interrupt)
    assert main(["top", "x"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("1,000 / 4,000")


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", ["interrupt", "pipe"])
def test_a_real_viewer_leaves(run, how):
    run.lock(LockOwner.current())
    run.write(record(1000))
    process = subprocess.Popen([sys.executable, "-m", "qfleet", "top", "x"], stdout=subprocess.PIPE, text=True,
                               env=os.environ | {"PYTHONUNBUFFERED": "1"})
    try:
        assert process.stdout.readline().endswith("is running\n")
        assert process.stdout.readline().startswith("1,000")
        if how == "interrupt":
            process.send_signal(signal.SIGINT)
        else:
            process.stdout.close()
            for step in (2000, 3000, 4000):
                run.write(record(step, **{"eval/mean_reward": 1.0}))
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()


# ---- doctor RUN ----

def test_the_doctor_says_what_limits_a_run_and_what_to_change(run, capsys):
    run.write(record(1000), record(2000))
    assert main(["doctor", "x"]) == 0
    out = capsys.readouterr().out
    rows = dict(line.split(maxsplit=1) if not line.startswith(("limited by", "actor time", "loop time", "policy lag"))
                else (line[:10].strip(), line[10:].strip()) for line in out.splitlines())
    assert rows["run"] == "runs/x has ended" and rows["done"] == "2,000 steps, 1,000 updates in 0:02"
    assert rows["limited by"].startswith("learner: actors are held back 80 %")
    assert "learner.batch_size" in rows["advice"]
    assert rows["rates"] == "1,000 steps/s, 500 updates/s" and rows["actor time"].endswith("waiting 70 %")
    assert rows["ratio"] == "7.9 samples per insert, 8 configured"
    assert rows["policy lag"] == "42 updates" and rows["memory"] == "5.4 MB of replay" and rows["faults"] == "none"


@pytest.mark.parametrize("gpus", [[], ["H200"]])
def test_a_gpu_is_advised_only_where_there_is_one(run, capsys, gpus):
    run.write(record(1000), record(2000))
    (run.path / "run.json").write_text(json.dumps({"attempts": [{"hardware": {"gpus": gpus}}]}))
    for verb in (["doctor", "x"], ["top", "x", "--once"]):
        assert main(verb) == 0
        out = capsys.readouterr().out
        assert ("a GPU (device=cuda)" in out) == bool(gpus) and "learner.precision=bf16 may make" in out, out


def test_the_doctor_finds_restarts_faults_and_a_learner_that_is_behind(run, capsys):
    run.write(record(1000), record(2000, **{"fault/env_rebuilds": 3, "fault/bad_updates": 2, "wire/retries": 9,
                                            "replay/samples_per_insert": 6.0, "replay/clamped_priorities": 0.0}))
    (run.path / "logs").mkdir()
    (run.path / "logs" / "actor-0.log").write_text("=== actor/0: start 1 ===\nTraceback\n=== actor/0: start 2 ===\n"
                                                   "=== actor/0: start 3 ===\nit said === actor/0: start 4 ===\n")
    (run.path / "logs" / "learner.log").write_text("=== learner: start 1 ===\n" * 2)  # resumed, that is
    (run.path / "logs" / "evaluator.log").write_bytes(b"\xff\xfe")
    assert main(["doctor", "x"]) == 0
    out = capsys.readouterr().out
    assert "restarts   2 of actor-0, see runs/x/logs/actor-0.log\n" in out and "of learner" not in out
    assert "3 episodes were lost" in out and "2 updates were skipped" in out
    assert "9 calls were repeated because no answer came" in out
    assert "6 samples per insert, 8 configured: the learner is behind" in out
    assert "clamped" not in out and "none" not in out
    assert main(["doctor", "x", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["restarts"] == {"actor-0": 2} and document["limit"]["limit"] == "learner"
    assert document["faults"] == {"fault/env_rebuilds": 3, "fault/bad_updates": 2, "wire/retries": 9}


def test_the_doctor_of_a_run_that_has_not_begun(run, capsys):
    assert main(["doctor", "x"]) == 0
    out = capsys.readouterr().out
    assert "unknown: no record contains timings" in out and "0 steps" in out
    run.write({"step": 50, "updates": 0, "time_s": 1.0})  # of a version that did not time its roles
    assert main(["doctor", "x"]) == 0 and "unknown: no record contains timings" in capsys.readouterr().out


def test_the_doctor_imports_nothing_that_a_run_names(run, capsys):
    (run.path / "config.yaml").write_text(CONFIG.replace("CartPole-v1", "evil_module:Env"))
    run.write(record(1000))
    assert main(["doctor", "x"]) == 0 and main(["top", "x", "--once"]) == 0
    assert "evil_module" not in sys.modules


def test_recipes_go_before_runs_of_the_same_name(run, capsys):
    run.path.rename(run.path.with_name("cartpole"))
    assert main(["doctor", "cartpole"]) == 0
    assert "packages" in capsys.readouterr().out
