"""One writer per run, what a resumed run may change, and new runs that start from trained weights."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from checkpoint_kit import rewrite_manifest
from real_runs import (
    ENVIRONMENT,
    TINY,
    Spy,
    assert_no_step_twice,
    command,
    newest,
    qfleet,
    records,
    train,
    wait_until,
    weights_hash,
)

from qfleet import api
from qfleet.cli.commands import main
from qfleet.core.errors import ProcessFault, UserError
from qfleet.core.seeds import seed_for
from qfleet.launch import local_launcher
from qfleet.process.handle import ChildSpec, LocalProcess
from qfleet.replay import memory_plan
from qfleet.report import progress
from qfleet.runs.checkpoint import CheckpointMeta, Checkpoints
from qfleet.runs.directory import RunDirectory
from qfleet.runs.lock import LockOwner
from qfleet.runs.run_state import run_state

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_two_processes_cannot_write_one_run(tmp_path):
    args = [*TINY, "total_steps=1000000", "checkpoint.period_steps=200", "run.name=x"]
    first = subprocess.Popen(command("train", "cartpole", *args), cwd=tmp_path, env=ENVIRONMENT,
                             stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: list(Path("runs/x/checkpoints").glob("step-*")), first)
        with pytest.raises(UserError, match=f"in use by process {first.pid}"):
            api.resume("x")
        assert main(["train", "cartpole", *args]) == 2
        assert api.evaluate("x", episodes=1, which="latest").episodes == 1, "reading is always allowed"
        assert first.poll() is None
    finally:
        first.kill()
        first.wait()
    assert api.resume("x", [f"total_steps={newest(Path('runs/x')).manifest.step + 50}"]).exit_code == 0, \
        "the lock of the dead is taken over"


def test_resume_refuses_other_learning_and_names_both_values(capsys):
    train("cartpole", "run.name=x", "total_steps=200")
    before = {path: path.read_bytes() for path in Path("runs/x").rglob("*") if path.is_file()}
    code = main(["resume", "x", "seed=4", "agent.hidden=[32]", "total_steps=400"])
    err = capsys.readouterr().err
    assert code == 2 and "seed: is 4, but the run was started with 1" in err
    assert "agent.hidden: is [32], but the run was started with [16]" in err and "total_steps" in err
    assert {path: path.read_bytes() for path in Path("runs/x").rglob("*") if path.is_file()} == before


def test_a_run_may_be_extended_moved_and_judged_otherwise():
    first = train("cartpole", "run.name=x", "total_steps=300")
    shutil.move("runs/x", "elsewhere")
    more = api.resume("elsewhere", ["total_steps=600", "eval.episodes=3", "checkpoint.keep=1", "stop_at=9999",
                                    "eval.period_steps=200"])
    assert more.exit_code == 0 and 600 <= more.steps < 610 and more.updates > first.updates
    assert len(list(Path("elsewhere/checkpoints").glob("step-*"))) == 1 and not Path("runs/x").exists()
    same = api.resume("elsewhere")
    assert (same.steps, same.updates, same.reason) == (more.steps, more.updates, "total_steps")
    assert_no_step_twice(Path("elsewhere"))


DEAD = LockOwner(LockOwner.current().host, 2**22 + 1, "")


def lock(run, owner):
    (run / "lock").write_text(f"{owner}\n")


def better_policy(run, score):
    """Save a policy of that score, as an evaluation between the last checkpoint and a crash does; its path."""
    last = newest(run)
    meta = CheckpointMeta(last.config_text, last.spec, {"mean_reward": score})
    return Checkpoints(run / "checkpoints", 2).save_policy(last.manifest.step + 50, last.manifest.updates,
                                                           last.policy(), meta)


@pytest.mark.parametrize("engine", [[], ["sync=allreduce"]], ids=["one process", "rank"])
def test_a_resumed_run_does_not_replace_the_best_policy_on_disk_by_a_worse_one(engine):
    """Killed between a new best and the next checkpoint, a run goes on from one that remembers a lower best."""
    def stop(record):
        if record["step"] >= 200:
            os.kill(os.getpid(), signal.SIGTERM)

    result = train("cartpole", "run.name=x", "total_steps=10000", "eval.period_steps=null", "run.log_period_steps=50",
                   *engine, sinks=[Spy(stop)])
    assert result.exit_code == 75 and newest(result.directory).state()["best"] is None
    best = better_policy(result.directory, 400.0)
    again = api.resume("x", [f"total_steps={result.steps + 100}"])
    last = [record for record in records(result.directory) if "eval/mean_reward" in record][-1]
    assert last["eval/mean_reward"] < 400 == last["eval/best_reward"] == again.best
    assert Checkpoints(result.directory / "checkpoints", 2).series("best") == [best]


class Broken(BaseException):  # an Exception in a sink would end the run with a checkpoint
    pass


def broken(record):
    if record["step"] >= 200:
        raise Broken("a sink of the user's")


@pytest.mark.parametrize("engine", [[], ["sync=allreduce"]], ids=["one process", "rank"])
def test_a_run_that_ended_before_its_first_checkpoint_starts_again(engine, capsys):
    with pytest.raises(Broken):
        train("cartpole", "run.name=x", "total_steps=10000", "run.log_period_steps=50", *engine, sinks=[Spy(broken)])
    run = Path("runs/x")
    assert main(["top", "x", "--once"]) == 0
    assert "has failed: Broken: a sink of the user's; `qfleet resume` starts it again" in capsys.readouterr().out
    result = api.resume("x", ["total_steps=300"])
    assert result.exit_code == 0 and result.steps >= 300 and newest(run).manifest.step == result.steps
    assert_no_step_twice(run)
    assert main(["top", "x", "--once"]) == 0 and capsys.readouterr().out.startswith("runs/x has ended\n")


def test_a_failed_resume_does_not_change_how_a_run_ended():
    with pytest.raises(Broken):
        train("cartpole", "run.name=x", "total_steps=10000", "run.log_period_steps=50", sinks=[Spy(broken)])
    lock(Path("runs/x"), DEAD)
    ended = json.loads(Path("runs/x/run.json").read_text())["ended"]
    Path("runs/x/checkpoints/step-000000000100.corrupt").mkdir(parents=True)
    with pytest.raises(UserError, match=r"no valid checkpoint to resume from, only step-000000000100.corrupt"):
        api.resume("x")
    assert run_state(RunDirectory(Path("runs/x"))) == "failed" and ended["reason"] == "failed"


def delete(run):
    shutil.rmtree(run)


def replace(run):
    run.rename("elsewhere")
    shutil.copytree("elsewhere", run)


@pytest.mark.parametrize("lose", [delete, replace])
def test_a_run_whose_directory_is_deleted_or_replaced_fails_and_says_so(lose, monkeypatch, capsys):
    lost = []

    def act(record):
        if record["step"] >= 200 and not lost:
            lost.append(lose(Path("runs/x")))

    with monkeypatch.context() as patched:
        patched.setattr(progress.ProgressView, "write", lambda view, record: act(record))
        assert main(["train", "cartpole", *TINY, "run.name=x", "total_steps=600", "run.log_period_steps=50"]) == 1
    err = capsys.readouterr().err
    assert "the run directory runs/x" in err and "deleted, moved or replaced" in err and "Traceback" not in err
    assert "qfleet resume" not in err
    if lose is delete:
        assert not list(Path("runs/x").rglob("*")), "nothing is made anew"
    else:
        assert not list(Path("runs/x").rglob("step-*")) and run_state(RunDirectory(Path("runs/x"))) == "died"


def test_a_fleet_whose_directory_is_deleted_fails_and_says_so(monkeypatch):
    """The head notices by itself, whatever its children do; here one that sleeps, and would end well."""
    def start(launcher, node, attempt, now, may_start):
        log = Path(f"{node.name.replace('/', '-')}.log")
        child = ChildSpec(node.name, [sys.executable, "-c", "import time; time.sleep(60)"], {}, log)
        return LocalProcess(child, attempt, now)

    monkeypatch.setattr(local_launcher.LocalLauncher, "start", start)

    def delete_once_it_runs():
        while not Path("learner.log").exists():
            time.sleep(0.01)
        delete(Path("runs/x"))

    deletion = threading.Thread(target=delete_once_it_runs, daemon=True)
    deletion.start()
    with pytest.raises(ProcessFault, match=r"the run directory runs/x or its run.json is missing"):
        train("cartpole", "run.name=x", "actors=1")
    deletion.join()
    assert not Path("runs/x").exists()


def test_a_best_policy_that_is_gone_is_not_remembered():
    train("cartpole", "run.name=x", "total_steps=200")
    shutil.rmtree(next(Path("runs/x/checkpoints").glob("best-*")))
    again = api.resume("x", ["total_steps=300"])
    assert Checkpoints(Path("runs/x/checkpoints"), 2).best_score() == again.best is not None


def test_a_checkpoint_of_another_run_is_not_resumed(capsys):
    train("cartpole", "run.name=x", "total_steps=100")
    other = newest(train("cartpole", "run.name=other", "total_steps=200", "seed=7").directory).path
    strange = shutil.copytree(other, Path("runs/x/checkpoints") / other.name)
    before = {path: path.read_bytes() for path in Path("runs/x").rglob("*") if path.is_file()}
    assert main(["resume", "x", "total_steps=300"]) == 2
    err = capsys.readouterr().err
    assert f"{strange} is a checkpoint of another run" in err and f"init_from={strange}" in err, err
    assert {path: path.read_bytes() for path in Path("runs/x").rglob("*") if path.is_file()} == before
    assert api.evaluate(strange, episodes=1).episodes == 1
    assert train("cartpole", "run.name=new", "total_steps=100", f"init_from={strange}").exit_code == 0
    shutil.rmtree(strange)
    assert api.resume("x", ["total_steps=130"]).exit_code == 0


def test_checkpoints_are_exchanged_between_copies_of_a_run_and_taken_without_an_id():
    first = train("cartpole", "run.name=x", "total_steps=100").directory
    copy = shutil.copytree(first, "runs/copy")
    later = newest(api.resume(copy, ["total_steps=150"]).directory).path
    shutil.copytree(later, first / "checkpoints" / later.name)
    assert api.resume("x", ["total_steps=200"]).steps >= 200, "a copy is the same run"
    record = json.loads((first / "run.json").read_text())
    (first / "run.json").unlink()
    assert api.resume("x", ["total_steps=220"]).exit_code == 0
    assert json.loads((first / "run.json").read_text())["id"] == record["id"], "known from the checkpoint"
    for path in (first / "checkpoints").glob("step-*"):  # as an earlier version wrote them, and run.json
        rewrite_manifest(path, lambda body: (body.update(format_version=2), body.pop("run")))
    (first / "run.json").write_text(json.dumps({"home": "", "attempts": []}))
    assert api.resume("x", ["total_steps=240"]).exit_code == 0
    assert newest(first).manifest.run == json.loads((first / "run.json").read_text())["id"] != record["id"]


def test_a_solved_run_goes_on_only_when_told():
    done = train("cartpole", "run.name=x", "total_steps=600", "stop_at=5", "eval.period_steps=100")
    assert done.reason == "stop_at" and done.steps < 600
    assert api.resume("x").steps == done.steps
    assert api.resume("x", ["stop_at=null"]).reason == "total_steps"


@pytest.mark.parametrize("limit", [[], ["replay.max_bytes=60e6"]])
def test_less_free_memory_than_at_the_start_does_not_keep_a_run_from_going_on(monkeypatch, limit):
    train("cartpole", "run.name=x", "total_steps=200", *limit)
    monkeypatch.setattr(memory_plan, "available_memory", lambda: 50_000_000)
    if limit:
        with pytest.raises(UserError, match="max_bytes=60 MB is more than the 50 MB of free memory"):
            api.resume("x", ["total_steps=300"])
    result = api.resume("x", ["total_steps=300", *(["replay.max_bytes=40e6"] if limit else [])])
    assert result.exit_code == 0 and result.steps >= 300


@pytest.mark.parametrize("mistake", ["agent.torso=nosuch", "init_from=nowhere", "agent.norm=layers"])
def test_a_run_that_never_began_leaves_nothing_behind(mistake, capsys):
    args = [*TINY, "toy/Catch-v0", "env.kwargs={pixels: true, side: 10}", "run.name=x", "total_steps=200", mistake]
    assert main(["train", *args]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert not Path("runs/x").exists(), "its name is free for the next try"


def test_init_from_begins_with_the_weights_of_another_run():
    source = train("cartpole", "run.name=a", "total_steps=1500", "eval.episodes=5")
    seed = seed_for(7, "evaluations", 0)
    # The first evaluation comes before the first update: it judges what was loaded.
    result = train("cartpole", "run.name=b", "total_steps=150", "init_from=a", "seed=7", "eval.period_steps=4",
                   "replay.min_steps=100", "eval.episodes=5", "eval.epsilon=0")
    first = next(record for record in records(result.directory) if "eval/mean_reward" in record)
    best = api.evaluate("a", which="best", episodes=5, seed=seed)
    assert first["updates"] == 0 and first["eval/mean_reward"] == best.mean_reward
    fresh = train("cartpole", "run.name=c", "total_steps=150", "seed=7", "eval.period_steps=4",
                  "replay.min_steps=100", "eval.episodes=5", "eval.epsilon=0")
    other = next(record for record in records(fresh.directory) if "eval/mean_reward" in record)
    assert other["eval/mean_reward"] != first["eval/mean_reward"]
    assert source.updates > 100 and weights_hash(result.directory) != weights_hash(source.directory)


def test_init_from_another_environment_or_network_is_refused_with_both(capsys):
    train("cartpole", "run.name=a", "total_steps=100")
    assert main(["train", "toy/Chain-v0", *TINY, "total_steps=100", "init_from=a", "run.name=b"]) == 2
    err = capsys.readouterr().err
    assert "CartPole-v1 with 2 actions, observing obs 4 float32" in err
    assert "toy/Chain-v0 has 2 actions, observing obs 5 float32" in err
    assert main(["train", "cartpole", *TINY, "agent.hidden=[17]", "total_steps=100", "init_from=a", "run.name=b"]) == 2
    err = capsys.readouterr().err
    assert "init_from=a" in err and "(16, 4)" in err and "(17, 4)" in err and "Traceback" not in err
    assert not Path("runs/b").exists()


def test_init_partial_takes_what_fits_and_says_what_does_not(caplog):
    train("cartpole", "run.name=a", "total_steps=300")
    trained = api.load("a").policy.flat.state()
    short = ["total_steps=90", "replay.min_steps=80", "init_from=a", "init_partial=true", "seed=3"]
    # Too few steps for an update of note: what was taken over is nearly as it was, and what was begun anew is not.
    for source, more, name in (("cartpole", ["agent.hidden=[16, 8]"], "b"), ("toy/Chain-v0", ["sync=allreduce"], "c"),
                               ("toy/Chain-v0", [], "d")):
        caplog.clear()
        result = train(source, *short, *more, f"run.name={name}")
        weights = newest(result.directory).policy()
        same = {key for key in weights if key in trained and weights[key].shape == trained[key].shape}
        assert same and same < set(weights)
        assert all(torch.allclose(weights[key], trained[key], atol=0.05) for key in same)
        anew = json.loads((result.directory / "run.json").read_text())["attempts"][0]["begun_anew"]
        assert f"{len(same)} of {len(weights)} tensors" in caplog.text and anew
        assert all(line.partition(":")[0] in caplog.text for line in anew)
    assert "(16, 4) in the checkpoint, (16, 5) here" in caplog.text


def test_a_finished_run_is_left_alone_and_says_how_to_go_on(capsys):
    """Also where the last scheduled checkpoint was taken just before the last evaluation."""
    for name, period in (("x", 0), ("y", 100)):
        train("cartpole", f"run.name={name}", "total_steps=200", f"checkpoint.period_steps={period}")
        before = {path: path.read_bytes() for path in Path("runs", name).rglob("*") if path.is_file()}
        assert main(["resume", name]) == 0
        out, err = capsys.readouterr()
        lines = out.splitlines()
        assert lines[0].startswith("nothing to do, the run is finished, all steps done: 200 steps"), out
        assert lines[1].startswith("score ") and lines[1].endswith("best policy, 20 fresh episodes"), "as before"
        assert lines[2:] == [f"resume     qfleet resume runs/{name} total_steps=400", f"runs/{name}"] and err == ""
        assert {path: path.read_bytes() for path in Path("runs", name).rglob("*") if path.is_file()} == before
    assert api.resume("x", ["total_steps=300"]).already_finished is False
    train("cartpole", "run.name=z", "total_steps=600", "stop_at=5", "eval.period_steps=100")
    assert main(["resume", "z"]) == 0 and "qfleet resume runs/z stop_at=null" in capsys.readouterr().out
    train("cartpole", "run.name=u", "total_updates=20")
    assert main(["resume", "u"]) == 0 and "qfleet resume runs/u total_updates=40" in capsys.readouterr().out


def test_the_last_evaluation_is_made_up_for():
    """Killed between the last checkpoint and the last evaluation: the run is not finished yet."""
    train("cartpole", "run.name=x", "total_steps=200", "checkpoint.period_steps=100")
    metrics = Path("runs/x/metrics.jsonl")
    kept = [line for line in metrics.read_text().splitlines() if "eval/mean_reward" not in line]
    metrics.write_text("".join(f"{line}\n" for line in kept))
    assert not api.resume("x").already_finished
    assert "eval/mean_reward" in records(Path("runs/x"))[-1] and api.resume("x").already_finished


def test_evaluating_on_a_changed_environment_is_refused(tmp_path):
    """The environment's code has changed since: another space is found before the first step."""
    Path("changing_env.py").write_text("from qfleet.envs.toy import Chain\n\n"
                                       "def make():\n    return Chain(5)\n")
    done = qfleet("train", "changing_env:make", *TINY, "total_steps=100", "run.name=x", "env.max_episode_steps=20",
                  cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    text = Path("changing_env.py").read_text()
    Path("changing_env.py").write_text(text.replace("Chain(5)", "Chain(6)"))
    for verb in (["eval", "x"], ["resume", "x", "total_steps=200"]):
        assert main(verb) == 2
