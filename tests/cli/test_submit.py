"""`qfleet submit slurm`: what the script says for each layout, and what is refused before Slurm sees it."""

import errno
import os
import shlex
import subprocess
import sys
import time

import pytest

from qfleet.cli.commands import COMMANDS, main, parse
from qfleet.cli.submit import job_of
from qfleet.launch.slurm import JobSize, SlurmJob, script, write

SUBMIT = next(command for command in COMMANDS if command.name == "submit")


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def job(*words):
    return job_of(parse(SUBMIT, ["slurm", *words]))


def settings(text):
    """What the script assigns, as bash reads it."""
    lines = [line for line in text.splitlines() if line.startswith(("layout=", "nodes=", "tasks="))]
    return dict(word.partition("=")[::2] for line in lines for word in shlex.split(line))


def assert_bash_reads(text):
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("words", "layout", "sizes", "steps"), [
    ([], "node", ("1", "1"), ("1", "1", "1")),
    (["actors=3", "-c", "4"], "node", ("1", "1"), ("1", "1", "4")),
    (["actors=4", "--nodes", "2", "-n", "5", "-c", "4"], "fleet", ("2", "3"), ("5", "3", "4")),
    (["sync=allreduce", "--nodes", "2", "--gpus-per-node", "8", "-c", "2"], "ranks", ("2", "8"), ("2", "1", "16")),
    (["sync=allreduce", "-n", "4", "--nodes", "2"], "ranks", ("2", "2"), ("2", "1", "2")),
    (["sync=server", "-n", "3", "-c", "2"], "node", ("1", "3"), ("1", "1", "6")),
])
def test_the_config_says_how_tasks_are_used(words, layout, sizes, steps):
    for local in (False, True):
        text = script(job("cartpole", "--name", "x", *words), local)
        assert_bash_reads(text)
        found = settings(text)
        assert (found["layout"], (found["nodes"], found["per_node"])) == (layout, sizes)
        assert (found["tasks"], found["tasks_per_node"], found["task_cpus"]) == steps
        assert ("Slurm's commands emulated" in text) == local


def test_a_ray_of_the_job_has_ports_a_folder_and_a_token_of_its_own(tmp_path):
    text = script(
        SlurmJob("ray", tmp_path / "x", JobSize(2, 2, 1, 4, 1), ["train", "pong"], ["resume", "x"], ["python", "-m"])
    )
    assert_bash_reads(text)
    assert settings(text)["layout"] == "ray"
    for words in ('--temp-dir="$TMPDIR"', '--port="$port"', "--num-cpus=$((per_node * cpus))", "RAY_AUTH_MODE=token",
                  "RAY_ADDRESS=$host:$port", "--include-dashboard=false"):
        assert words in text


@pytest.mark.slow
def test_a_ray_that_does_not_start_is_tried_again_and_then_told(tmp_path):
    """A busy node: `ray start` gives up, and is started again until the time for it is over."""
    (tmp_path / "ray" / "scripts").mkdir(parents=True)
    (tmp_path / "ray" / "__init__.py").touch()
    (tmp_path / "ray" / "scripts" / "scripts.py").write_text(
        "import pathlib, sys\nprint('timed out')\npathlib.Path('tries').open('a').write('x')\nsys.exit(1)\n")
    given = SlurmJob(
        "ray", tmp_path / "x", JobSize(), ["train", "cartpole"], ["resume", "x"], [sys.executable, "-m", "qfleet"]
    )
    write(given, local=True)
    done = subprocess.run(["bash", str(given.script)], cwd=tmp_path, capture_output=True, text=True, timeout=60,
                          env=os.environ | {"PYTHONPATH": str(tmp_path), "ray_s": "4"})
    assert done.returncode == 1 and "error: ray did not start on" in done.stderr and "timed out" in done.stderr
    assert len((tmp_path / "tries").read_text()) > 1 and not (tmp_path / "x").exists()


@pytest.fixture
def sbatch(tmp_path, monkeypatch):
    """An sbatch that does what it is told."""
    (tmp_path / "bin").mkdir()

    def told(text):
        path = tmp_path / "bin" / "sbatch"
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o700)

    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return told


def left(tmp_path):
    return {str(path.relative_to(tmp_path)): path.read_text() if path.is_file() else None
            for path in tmp_path.rglob("*") if "bin" not in path.relative_to(tmp_path).parts}


def test_a_refused_submission_leaves_nothing_and_an_earlier_script_as_it_was(tmp_path, sbatch, capsys):
    sbatch("echo 'sbatch: error: invalid partition' >&2; exit 1")
    assert main(["submit", "slurm", "cartpole", "--name", "x", "--prefix", "group"]) == 2
    assert "invalid partition" in capsys.readouterr().err and left(tmp_path) == {}
    sbatch("echo 7")
    assert main(["submit", "slurm", "cartpole", "--name", "x"]) == 0
    before = left(tmp_path)
    assert "runs/slurm/x/job.sh" in before
    sbatch("exit 1")
    assert main(["submit", "slurm", "cartpole", "seed=5", "--name", "x"]) == 2
    assert left(tmp_path) == before, "the job that was accepted may still wait, and its tasks run this script"
    (tmp_path / "runs" / "slurm" / "x" / "job.sh").unlink()
    assert main(["submit", "slurm", "cartpole", "--name", "x"]) == 2
    assert "runs/slurm/x/job.sh" not in left(tmp_path)


def test_a_submission_that_cannot_be_written_or_is_interrupted_leaves_nothing(tmp_path, sbatch, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    def interrupted(job):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.write_text", full)
        assert main(["submit", "slurm", "cartpole", "--name", "x"]) == 2
    assert left(tmp_path) == {}
    monkeypatch.setattr("qfleet.launch.slurm.submit_job", interrupted)
    assert main(["submit", "slurm", "cartpole", "--name", "x"]) == 130 and left(tmp_path) == {}


@pytest.mark.timeout(60)
def test_a_function_of_the_environment_is_not_called_when_a_job_is_cancelled(tmp_path):
    given = job("cartpole", "--name", "x")
    write(given)
    (tmp_path / "srun").write_text("#!/bin/bash\ntouch begun\nuntil [[ -e go ]]; do sleep 0.05; done\n")
    (tmp_path / "srun").chmod(0o700)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "1",
                        "BASH_FUNC_cancelled%%": "() { touch called; }"}
    process = subprocess.Popen(["bash", str(given.script)], cwd=tmp_path, stdout=subprocess.DEVNULL, env=env)
    try:
        while not (tmp_path / "begun").exists():
            assert process.poll() is None
            time.sleep(0.02)
        process.terminate()
        time.sleep(0.3)
        (tmp_path / "go").touch()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
    assert not (tmp_path / "called").exists()


def test_options_of_slurm_stand_in_the_script(tmp_path):
    given = job("cartpole", "seed=3", "--name", "my run", "--prefix", "group", "--time", "04:00:00", "-p", "gpu",
                "--gpus-per-node", "1", "--sbatch=--account=abc")
    head = script(given).partition("\n\n")[0].splitlines()
    assert given.run == tmp_path / "runs" / "group" / "my run"
    for option in ('--job-name="my run"', "--nodes=1", "--ntasks=1", "--gpus-per-node=1", "--partition=gpu",
                   "--requeue", "--time=04:00:00", "--open-mode=append", "--signal=B:USR1@120", "--account=abc",
                   f'--output="{tmp_path}/runs/group/slurm/my run/out.txt"'):
        assert f"#SBATCH {option}" in head
    assert given.train[:3] == ["train", "cartpole", "seed=3"] and 'run.name="my run"' in given.train
    assert given.resume == ["resume", str(given.run), "--trust"]


def test_actors_are_one_per_cpu_of_those_who_join_unless_they_are_given():
    assert "actors=8" in job("cartpole", "-n", "3", "-c", "4").train
    assert job("cartpole", "actors=5", "-n", "3").actors == 5


def test_a_run_that_exists_is_gone_on_with(tmp_path, capsys):
    run = tmp_path / "runs" / "old"
    run.mkdir(parents=True)
    assert main(["config", "show", "cartpole"]) == 0
    (run / "config.yaml").write_text(capsys.readouterr().out)
    found = job("runs/old", "total_steps=90000")
    assert not found.train and found.resume == ["resume", str(run), "--trust", "total_steps=90000"]
    assert main(["submit", "slurm", "cartpole", "--name", "old", "--dry-run"]) == 2
    assert f"qfleet submit slurm {run}" in capsys.readouterr().err
    assert main(["submit", "slurm", "runs/old", "--name", "new", "--dry-run"]) == 2


def test_a_dry_run_prints_the_script_and_leaves_nothing(tmp_path, capsys):
    assert main(["submit", "slurm", "cartpole", "--name", "x", "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("#!/bin/bash\n#SBATCH --job-name=x\n") and not list(tmp_path.iterdir())
    assert_bash_reads(text)


def test_without_slurm_people_are_told_where_there_is_one(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["submit", "slurm", "cartpole", "--name", "x"]) == 2
    assert "sbatch is not found" in capsys.readouterr().err and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("words", "told"), [
    (["cartpole", "-n", "0"], "0 is too small: the minimum is 1"),
    (["cartpole", "-n", "5", "--nodes", "2", "--ntasks-per-node", "2"], "choose from 2 to 4"),
    (["cartpole", "--nodes", "3", "-n", "2", "actors=2"], "choose from 3 to 3"),
    (["cartpole", "device=cpu", "--gpus-per-node", "1"], "the GPUs would be unused"),
    (["cartpole", "device=cuda"], "add --gpus-per-node 1"),
    (["cartpole", "sync=server", "--nodes", "2"], "share one host"),
    (["cartpole", "sync=server", "learners=3", "-n", "2"], "each task is one learner"),
    (["cartpole", "sync=allreduce", "learners=3", "-n", "2"], "each task is one learner"),
    (["cartpole", "sync=allreduce", "--nodes", "2", "-n", "3"], "choose a multiple"),
    (["cartpole", "actors=1", "-n", "3"], "actors=1 cannot be divided among 2 tasks"),
    (["cartpole", "launcher=ray", "actors=1", "-c", "1"],
     "request 2 CPUs of a node, an actor 1, and a node of the job has 1"),
    (["cartpole", "actors=2", "--nodes", "2", "--local"], "--local is one machine"),
    (["cartpole", "--name", "a/b"], "a single folder name"),
    (["cartpole", "learner.batch=3"], "unknown key"),
    (["nothing"], "is not a recipe"),
])
def test_mistakes_are_told_before_anything_is_written(words, told, tmp_path, capsys):
    assert main(["submit", "slurm", *words]) == 2
    assert told in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())


def test_other_clusters_are_not_known(capsys):
    assert main(["submit", "pbs", "cartpole"]) == 2
    assert "qfleet submit slurm" in capsys.readouterr().err
