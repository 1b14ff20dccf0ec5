"""A disk that fills while training: the run goes on, the older checkpoint stays, the exit code tells."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from real_runs import TINY, Spy, newest, records, train

from qfleet import api
from qfleet.cli.commands import main
from qfleet.report import progress

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ARGS = ["run.name=x", "eval.period_steps=null", "checkpoint.period_steps=300", "total_steps=1500",
        "run.tensorboard=true", "replay.capacity=4000"]


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """A file system of four megabytes that holds the runs. It must be mountable: a full disk cannot be faked well."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)], check=True, timeout=30)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=30)


def fill(disk, but=0):
    """Take all the room that is left, but so many bytes."""
    with open(disk / "filler", "wb", buffering=0) as file:
        if but:
            file.write(bytes(shutil.disk_usage(disk).free - but))
            return
        for size in (2**16, 2**12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


def between(disk, first, last):
    """A sink that fills the disk from one step on, and makes room at another."""
    def act(record):
        if first <= record["step"] < last and not (disk / "filler").exists():
            fill(disk)
        elif record["step"] >= last:
            (disk / "filler").unlink(missing_ok=True)
    return Spy(act)


def test_training_goes_on_and_the_exit_code_tells(disk, caplog, capsys):
    spy = between(disk, 900, 10**9)
    result = train("cartpole", *ARGS, sinks=[spy])
    assert result.exit_code == 1 and result.reason == "total_steps" and result.steps >= 1500
    assert 600 <= newest(result.directory).manifest.step < 1000
    assert spy.records[-1]["fault/checkpoints_failed"] >= 3, "two on schedule and the last one"
    assert "could not be saved" in caplog.text and "the disk is full" in caplog.text
    assert "metrics.jsonl: record lost" in caplog.text
    assert records(result.directory)[-1]["step"] >= 800, "whole lines only, those before it at least"
    assert not list(result.directory.glob("checkpoints/.tmp-*"))
    (disk / "filler").unlink()
    again = api.resume("x")
    assert again.exit_code == 0 and newest(result.directory).manifest.step == again.steps >= 1500


def test_room_in_time_is_as_if_nothing_had_been(disk):
    result = train("cartpole", *ARGS, sinks=[between(disk, 500, 1000)])
    assert result.exit_code == 0
    assert newest(result.directory).manifest.step == result.steps
    last = records(result.directory)[-1]
    assert last["fault/checkpoints_failed"] == 2 and last["step"] == result.steps


def test_an_interruption_that_could_not_be_saved_does_not_claim_so(disk, capsys):
    def act(record):
        if record["step"] >= 500:
            fill(disk)
            os.kill(os.getpid(), signal.SIGTERM)

    result = train("cartpole", *ARGS, sinks=[Spy(act)])
    assert result.exit_code == 1 and result.reason == "preempted"
    assert newest(result.directory).manifest.step < result.steps

    from qfleet.cli.train import describe_ending
    assert "could not be saved" in describe_ending(result) and "is saved" not in describe_ending(result)


def test_a_disk_too_small_for_the_plan_is_reported_before_the_start(disk, caplog, capsys, monkeypatch):
    """Without a checkpoint at the end, only what can be done with the records is offered."""
    fill(disk, but=120_000)
    args = ["train", "cartpole", *TINY, *ARGS, "run.tensorboard=false"]
    assert main([*args, "--dry-run"]) == 0 and "too small for this run" in caplog.text
    caplog.clear()
    monkeypatch.setattr(progress.ProgressView, "write", lambda view, record: (disk / "filler").unlink() or fill(disk))
    assert main(args) == 1
    out = capsys.readouterr().out
    begin = caplog.messages[0]
    assert "too small for this run: checkpoints take up to about 198 KB at the same time, and 11" in begin, begin
    assert "could not be saved" in caplog.text and "training continues, there is no earlier checkpoint" in caplog.text
    assert "there is no checkpoint to resume from" in out and "qfleet plot" in out
    assert not any(f"qfleet {verb} " in out for verb in ("resume", "eval", "record")), out


def test_a_run_that_cannot_even_begin_says_so_and_leaves_nothing(disk, capsys):
    fill(disk)
    code = main(["train", "cartpole", *TINY, *ARGS])
    err = capsys.readouterr().err
    assert code == 2 and "No space left" in err and "run.root" in err and "Traceback" not in err
    assert not Path("runs/x").exists()
