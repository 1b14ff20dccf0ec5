"""Learners that average gradients: one is a run without sync to the bit; several are killed, told to stop, go on."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fleet_runs import assert_goes_forward
from real_runs import ENVIRONMENT, TINY, command, newest, qfleet, records, train, weights_hash

from qfleet import api
from qfleet.config import to_yaml
from qfleet.core.errors import UserError
from qfleet.launch.allreduce_run import RankContext, train_rank
from qfleet.launch.run_request import RunRequest
from qfleet.runconfig.resolution import resolve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]
LEARNERS = [*TINY, "sync=allreduce", "allreduce.timeout_s=30", "fleet.heartbeat_timeout_s=20",
            "checkpoint.period_steps=200", "eval.period_steps=400"]


def ranks_of(run):
    """Process ids of the ranks of a run, which torchrun or the driver started, and of their evaluator, "e"."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                environ = dict(pair.partition(b"=")[::2] for pair in (entry / "environ").read_bytes().split(b"\0"))
                here = os.readlink(entry / "cwd") == str(run)
            except OSError:
                continue
            rank = environ.get(b"RANK", environ.get(b"QFLEET_RANK"))
            if here and b"qfleet" in words and (rank is not None or b"evaluator" in words):
                found["e" if b"evaluator" in words else int(rank)] = int(entry.name)
    return found


def reachable(pid):
    """Addresses other than this host's own at which a process listens, in the hexadecimal digits of the kernel."""
    links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
    tables = [line.split() for name in ("tcp", "tcp6")
              for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()]
    listening = {row[1] for row in tables if row[3] == "0A" and f"socket:[{row[9]}]" in links}
    return {each for each in listening if not each.startswith(("0100007F:", "0" * 24 + "01000000:"))}


def until(ready, process, timeout=240):
    deadline = time.monotonic() + timeout
    while not ready():
        assert process.poll() is None, f"ended by itself with {process.returncode}"
        assert time.monotonic() < deadline, "was never ready"
        time.sleep(0.05)


@pytest.mark.parametrize("overrides", [[], ["replay.alpha=0.6"]])
def test_one_rank_is_solo(tmp_path, monkeypatch, overrides):
    """Whole runs, with evaluations, checkpoints and a resume between."""
    monkeypatch.chdir(tmp_path)
    schedule = ["total_steps=500", "checkpoint.period_steps=200", "eval.period_steps=150", *overrides]
    solo = train("cartpole", *schedule, "run.name=solo").directory
    one = train("cartpole", *schedule, "run.name=one", "sync=allreduce").directory
    assert weights_hash(solo) == weights_hash(one)
    for run in (solo, one):
        api.resume(run, ["total_steps=800"])
    assert weights_hash(solo) == weights_hash(one)
    curves = [[(r["step"], r["updates"], r["eval/mean_reward"]) for r in records(run) if "eval/mean_reward" in r]
              for run in (solo, one)]
    assert curves[0] == curves[1] and len(curves[0]) >= 5


def test_a_rank_that_resumes_does_not_need_the_run_of_init_from(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train("cartpole", "run.name=source", "total_steps=200")
    run = train("cartpole", "run.name=x", "sync=allreduce", "init_from=source", "total_steps=400").directory
    shutil.rmtree("runs/source")
    config = resolve(str(run / "config.yaml"), ["total_steps=600"]).config
    (run / "config.yaml").write_text(to_yaml(config))
    request = RunRequest(str(run), newest(run).spec.to_json(), {})
    assert train_rank(request, RankContext(None)).steps >= 600


def test_a_rank_that_never_began_leaves_its_name_free(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = train("cartpole", "total_steps=200", "run.name=source").directory
    with pytest.raises(UserError, match="init_from"):
        train("cartpole", "run.name=x", "sync=allreduce", f"init_from={source}", "agent.hidden=[9]")
    assert not Path("runs/x").exists()


def test_ranks_train_survive_a_death_and_others_go_on(tmp_path, monkeypatch):
    words = ["train", "cartpole", *LEARNERS, "learners=2", "total_steps=6000", "run.name=x", "--json"]
    process = subprocess.Popen(command(*words), cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    run = tmp_path / "runs" / "x"
    try:
        until(lambda: list(run.glob("checkpoints/step-*")) and len(ranks_of(tmp_path)) == 3, process)
        assert not any(reachable(pid) for pid in [process.pid, *ranks_of(tmp_path).values()]), "only this host's"
        os.kill(ranks_of(tmp_path)["e"], signal.SIGSTOP)  # whoever hangs there hinders nobody, and is replaced
        grown = newest(run).manifest.step + 400
        until(lambda: newest(run).manifest.step >= grown, process)
        os.kill(ranks_of(tmp_path)[1], signal.SIGKILL)
        out, _ = process.communicate(timeout=300)
    finally:
        process.kill()
        process.wait()
    result = json.loads(out)
    assert process.returncode == 0 and result["reason"] == "total_steps" and 6000 <= result["steps"] < 6010
    record = json.loads((run / "run.json").read_text())
    assert len(record["attempts"]) == 2, "one death, one restart"
    for rank in range(2):
        assert (run / "logs" / f"learner-{rank}.log").read_text().count("=== ") == 2, "each has a log"
    assert newest(run).manifest.run == record["id"]
    assert_goes_forward(run)
    assert [r for r in records(run) if "eval/mean_reward" in r][-1]["step"] == result["steps"], "the last are judged"
    state = newest(run).state()
    assert len(state["ranks"]) == 1 and state["clock"]["steps"] + state["ranks"][0]["clock"]["steps"] == result["steps"]
    assert not (run / "parts").exists() and not ranks_of(tmp_path)
    monkeypatch.chdir(tmp_path)
    alone = api.resume(run, ["learners=1", "total_steps=6300"])
    assert alone.exit_code == 0 and 6300 <= alone.steps < 6310 and alone.updates > result["updates"]
    assert "ranks" not in newest(run).state() and newest(run).state()["clock"]["steps"] == alone.steps


@pytest.mark.parametrize("override,code,words", [
    ("learner.learning_rate=1e30", 1, "training failed: loss or gradient was not finite"),
    ("agent.torso=nowhere:Torso", 2, "nowhere")])
def test_what_no_restart_mends_is_not_tried_again(tmp_path, override, code, words):
    done = qfleet("train", "cartpole", *LEARNERS, "learners=2", "total_steps=3000", "run.name=x", override,
                  "learner.max_bad_updates=3", "learner.clip_norm=0", cwd=tmp_path)
    assert done.returncode == code and words in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not ranks_of(tmp_path)
    if code == 1:
        assert len(json.loads((tmp_path / "runs" / "x" / "run.json").read_text())["attempts"]) == 1


def test_ranks_that_are_told_to_stop_save_and_leave(tmp_path):
    words = ["train", "cartpole", *LEARNERS, "learners=2", "total_steps=1000000", "run.name=x"]
    process = subprocess.Popen(command(*words), cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.DEVNULL)
    run = tmp_path / "runs" / "x"
    try:
        until(lambda: list(run.glob("checkpoints/step-*")), process)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(120) == 75
    finally:
        process.kill()
        process.wait()
    assert not ranks_of(tmp_path)
    last = records(run)[-1]
    assert newest(run).manifest.step == last["step"] and newest(run).manifest.updates == last["updates"]


def test_torchrun_itself_is_enough(tmp_path):
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "qfleet",
             "train", "cartpole", *LEARNERS, "total_steps=900", "run.name=x", "allreduce.shard_optimizer=true"]
    done = subprocess.run(words, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "runs/x" and done.stdout.count("all steps done") == 1, "one rank speaks"
    run = tmp_path / "runs" / "x"
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["x"]
    assert 900 <= newest(run).manifest.step < 910 and "learners: 2" in (run / "config.yaml").read_text()
    assert qfleet("eval", "x", "--episodes", "2", cwd=tmp_path).returncode == 0
