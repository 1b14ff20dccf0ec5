"""Runs under a real Slurm: solved, warned and requeued, cancelled; its tasks as a fleet, as ranks; and without it."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from fleet_runs import assert_goes_forward
from real_runs import ENVIRONMENT, TINY, command, newest, records
from slurm_kit import Slurm, needs_slurm
from test_allreduce_run import ranks_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
ENDLESS = ["total_steps=10000000"]
SMALL = [*TINY, "eval.period_steps=null", "device=cpu", "checkpoint.period_steps=400"]


@pytest.fixture(scope="module")
def slurm():
    cluster = Slurm()
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


def submitted(slurm, cwd, *words):
    """Number, run and folder of a job."""
    done = subprocess.run(command("submit", "slurm", *words, "--json"), cwd=cwd, env=slurm.env, capture_output=True,
                          text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    return told["job"], Path(told["directory"]), Path(told["script"]).parent


def attempts(run):
    return json.loads((run / "run.json").read_text())["attempts"]


def end_soon(run, steps=300):
    """A run that was endless is to end in its next life."""
    text, now = (run / "config.yaml").read_text(), newest(run).manifest.step
    assert "\ntotal_steps: 10000000\n" in text
    (run / "config.yaml").write_text(text.replace("total_steps: 10000000", f"total_steps: {now + steps}"))
    return now


def saved(run):
    return list(run.glob("checkpoints/step-*"))


@pytest.fixture(scope="module")
def solving(slurm, tmp_path_factory):
    """A job that was told that its time is nearly up; in its second life it learns on while other tests go on."""
    place = tmp_path_factory.mktemp("solving")
    number, run, folder = submitted(slurm, place, "cartpole", "device=cpu", "checkpoint.period_steps=500",
                                    "total_steps=200000", "--name", "solved", "--prefix", "group", "--time", "60",
                                    "-p", "main")
    out = folder / "out.txt"
    assert run == place / "runs" / "group" / "solved"
    slurm.until(lambda: saved(run), about=out)
    slurm.warn(number)
    slurm.requeued(number, out)
    step, last = newest(run).manifest.step, records(run)[-1]["step"]
    slurm.lives_again(number, out)
    return number, run, folder, step, last


@pytest.fixture(scope="module")
def limited(slurm, tmp_path_factory):
    """Ranks on two nodes whose time limit is nearly reached: Slurm looks every half minute."""
    number, run, folder = submitted(slurm, tmp_path_factory.mktemp("limited"), "cartpole", *SMALL, *ENDLESS,
                                    "sync=allreduce", "--nodes", "2", "--name", "ranks")
    slurm.until(lambda: saved(run), about=folder / "out.txt")
    slurm.cut_short(number)
    return number, run, folder


@needs_slurm
def test_a_job_that_is_told_to_saves_and_lives_again(slurm, solving):
    _, run, folder, step, last = solving
    assert step == last, "it saved when it was told to stop"
    slurm.until(lambda: len(attempts(run)) == 2, about=folder / "out.txt")
    assert [attempt.get("resumed_from") for attempt in attempts(run)] == [None, f"step-{step:012d}"]


@needs_slurm
def test_head_and_joined_node_are_cancelled_and_leave_nothing(slurm, tmp_path):
    number, run, folder = submitted(slurm, tmp_path, "cartpole", *SMALL, "actors=2", *ENDLESS,
                                    "--nodes", "2", "-c", "2", "--name", "endless")
    out = folder / "out.txt"
    slurm.until(lambda: saved(run), about=out)  # the head plays nothing itself: somebody has joined
    assert (folder / "token").stat().st_mode & 0o777 == 0o600
    assert list(Path("/tmp").glob(f"qf-{number}.0/qfleet-*/fleet.sock")) and len(slurm.everybody(number)) > 4
    slurm.ask("scancel", number)
    job = slurm.ends(number, "CANCELLED", out)
    assert job["Restarts"] == "0" and "requeue" not in out.read_text().casefold(), "what is cancelled stays so"
    assert newest(run).manifest.step == records(run)[-1]["step"], "it was given the time to save"
    slurm.assert_gone(number, folder)


@needs_slurm
def test_a_ray_of_the_job_learns_on_two_nodes_and_saves_when_told(slurm, tmp_path):
    number, run, folder = submitted(slurm, tmp_path, "cartpole", *SMALL, "launcher=ray", "actors=1", *ENDLESS,
                                    "--nodes", "2", "-c", "2", "--name", "ray")
    out = folder / "out.txt"
    slurm.until(lambda: saved(run), about=out)  # learner and evaluator fill the first node: who plays is on the other
    assert (folder / "token").stat().st_mode & 0o777 == 0o600
    slurm.warn(number)
    slurm.requeued(number, out)
    assert newest(run).manifest.step == records(run)[-1]["step"], "it saved when it was told to stop"
    slurm.ask("scancel", number)
    slurm.ends(number, "CANCELLED", out)
    slurm.assert_gone(number, folder)


@needs_slurm
def test_srun_of_the_plain_command_makes_ranks_of_its_tasks(slurm, tmp_path, limited):
    words = command("train", "cartpole", *SMALL, "sync=allreduce", "total_steps=900", "run.name=plain")
    done = subprocess.run(["srun", "--ntasks=2", f"--nodelist={slurm.host}", *words], cwd=tmp_path, env=slurm.env,
                          capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "runs/plain" and done.stdout.count("all steps done") == 1, "one speaks"
    assert len(newest(tmp_path / "runs" / "plain").state()["ranks"]) == 1


@needs_slurm
def test_what_sbatch_refuses_is_told_and_leaves_nothing(slurm, tmp_path):
    done = subprocess.run(command("submit", "slurm", "cartpole", "--name", "x", "-p", "nowhere"), cwd=tmp_path,
                          env=slurm.env, capture_output=True, text=True, timeout=150)
    assert done.returncode == 2 and "invalid partition" in done.stderr and "sinfo" in done.stderr, done.stderr
    assert list(tmp_path.iterdir()) == []


@needs_slurm
def test_ranks_of_two_nodes_go_on_when_their_time_is_up(slurm, limited):
    number, run, folder = limited
    out = folder / "out.txt"
    slurm.requeued(number, out)
    step = end_soon(run)
    slurm.lives_again(number, out)
    slurm.ends(number, "COMPLETED", out)
    assert [attempt.get("resumed_from") for attempt in attempts(run)] == [None, f"step-{step:012d}"]
    assert newest(run).manifest.step >= step + 300 and len(newest(run).state()["ranks"]) == 1
    slurm.assert_gone(number, folder)


def test_without_slurm_the_same_tasks_live_here_lose_a_rank_and_live_again(tmp_path):
    out, run = tmp_path / "said.txt", tmp_path / "runs" / "here"
    with out.open("wb") as said:
        shell = subprocess.Popen(command("submit", "slurm", "cartpole", *SMALL, "sync=allreduce", "-n", "2",
                                         *ENDLESS, "--name", "here", "--local"),
                                 cwd=tmp_path, env=ENVIRONMENT, stdout=said, stderr=said, start_new_session=True)
    try:
        until(lambda: saved(run), shell, out)
        os.kill(ranks_of(tmp_path)[1], signal.SIGKILL)
        until(lambda: len(attempts(run)) == 2, shell, out)
        begun = attempts(run)[1]["resumed_from"]
        until(lambda: newest(run).path.name > begun, shell, out)
        end_soon(run)
        shell.send_signal(signal.SIGUSR1)
        assert shell.wait(420) == 0, out.read_text()
    finally:
        shell.kill()
        shell.wait()
    assert out.read_text().count("start 1: resume") == out.read_text().count("start 2: resume") == 1
    assert len(attempts(run)) == 3 and not ranks_of(tmp_path)
    assert sorted(path.name for path in (tmp_path / "runs" / "slurm" / "here").iterdir()) == ["job.sh"]
    assert not list(Path("/tmp").glob(f"qf-{shell.pid}.*"))


@needs_slurm
def test_cartpole_is_solved_though_its_time_was_up_once(slurm, solving):
    number, run, folder, _, _ = solving
    slurm.ends(number, "COMPLETED", folder / "out.txt")
    assert max(record.get("eval/mean_reward", 0) for record in records(run)) >= 475
    assert len(attempts(run)) == 2
    assert_goes_forward(run)
    slurm.assert_gone(number, folder)


def until(ready, process, out, timeout=420):
    deadline = time.monotonic() + timeout
    while not ready():
        assert process.poll() is None, out.read_text()
        assert time.monotonic() < deadline, out.read_text()
        time.sleep(0.1)
