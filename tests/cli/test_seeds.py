"""`train --seeds N --jobs M` with scripted processes: names of the runs, failures, and where the seeds begin."""

import json
from pathlib import Path

import pytest

from qfleet.cli.commands import main
from qfleet.cli.train import _per_seed
from qfleet.launch.train_result import TrainResult
from qfleet.runconfig.resolution import resolve


class ScriptedRun:
    """Stands in for the process of a run. Those of the seeds in `failing` fail."""

    failing: tuple[int, ...] = ()

    def __init__(self, order, folder, threads):
        self.config, self.directory = order.config, order.directory
        self.log = folder / f"{order.directory.path.name}.log"
        self.log.write_text("ValueError: no such level\n")
        self.exited = True

    def new_records(self):
        return []

    def kill(self): ...

    def end(self):
        if self.config.seed in self.failing:
            return None, f"no such level (log: {self.log})"
        return TrainResult(self.directory.path, 1, 1, 1, 1.0, None, "total_steps", 0), ""


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("qfleet.launch.run_process.RunProcess", ScriptedRun)
    monkeypatch.setattr(ScriptedRun, "failing", ())
    return tmp_path


def parallel(*words):
    return main(["train", "cartpole", "--seeds", "2", "--jobs", "2", *words])


def test_a_failed_seed_is_in_the_document_and_its_log_stays(place, monkeypatch, capsys):
    monkeypatch.setattr(ScriptedRun, "failing", (2,))
    assert parallel("--json", "run.root=~/runs", "run.name=x") == 1
    out, err = capsys.readouterr()
    good, bad = json.loads(out)
    assert (good["directory"], good["exit_code"]) == (str(place / "home/runs/x-s1"), 0)
    assert (bad["directory"], bad["seed"], bad["exit_code"]) == (str(place / "home/runs/x-s2"), 2, 1)
    log = Path(bad["error"].partition("(log: ")[2].rstrip(")"))
    assert log.read_text() == "ValueError: no such level\n" and f"seed 2 failed: {bad['error']}" in err


def test_logs_are_removed_if_no_seed_fails(place):
    assert parallel("run.name=x") == 0
    assert not list(place.glob("qfleet-seeds-*"))


def test_a_taken_name_is_found_in_the_home_directory(place, capsys):
    (place / "home/runs/x-s2").mkdir(parents=True)
    assert parallel("run.root=~/runs", "run.name=x") == 2
    assert "home/runs/x-s2 exists already" in capsys.readouterr().err


def test_commands_of_the_same_second_choose_different_names(monkeypatch, capsys):
    found = []
    for process in (11, 12):
        monkeypatch.setattr("os.getpid", lambda process=process: process)
        assert parallel("--json") == 0
        found += [Path(run["directory"]).name for run in json.loads(capsys.readouterr().out)]
    assert len(set(found)) == 4 and [name.rpartition("-")[2] for name in found] == ["11", "11", "12", "12"]


def test_all_seeds_begin_with_the_weights_of_the_same_run(place):
    run = place / "runs/first"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("seed: 1\n")
    words = ["init_from=last"]
    more = _per_seed(resolve("cartpole", words).config, 2)
    (place / "runs/second").mkdir()
    (place / "runs/second/config.yaml").write_text("seed: 1\n")
    assert [resolve("cartpole", [*words, *each]).config.init_from for each in more] == ["runs/first"] * 2
    assert _per_seed(resolve("cartpole").config, 2) == [["seed=1"], ["seed=2"]]
