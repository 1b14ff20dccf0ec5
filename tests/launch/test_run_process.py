"""Orders to train runs in processes of their own, and which directories these processes touch."""

import sys
from dataclasses import replace

import pytest

from qfleet.launch.run_process import RunOrder, run_order, with_place
from qfleet.launch.train_result import TrainResult
from qfleet.runconfig.resolution import resolve
from qfleet.runs.directory import RunDirectory


@pytest.fixture
def order(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    resolved = resolve("cartpole")
    return RunOrder(with_place(resolved.config, tmp_path / "runs", "a"), resolved.provenance, ["qfleet", "train", "x"])


def carried_out(order, tmp_path):
    """What `run_order` does with an order: `train` or `resume`."""
    called = []

    def result(what):
        called.append(what)
        return TrainResult(order.directory.path, 1, 1, 1, 1.0, None, "total_steps", 0)

    order.write(tmp_path / "a.json")
    assert run_order(tmp_path / "a.json", lambda order: result("train"), lambda run, trust: result("resume")) == 0
    assert sys.argv == ["qfleet", "train", "x"]
    return called


def test_an_order_is_written_as_it_is(order, tmp_path):
    order.write(tmp_path / "a.json")
    assert RunOrder.read(tmp_path / "a.json") == order


@pytest.mark.parametrize("files", [{}, {"thesis.tex": "x"}, {"config.yaml": "seed: 1\n", "run.json": "{}"},
                                   {"run.json": "{}"}])
def test_a_directory_of_others_is_neither_removed_nor_resumed(order, tmp_path, files):
    folder = order.directory.path
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    assert carried_out(order, tmp_path) == ["train"], "which refuses the name"
    assert {path.name: path.read_text() for path in folder.iterdir()} == files


def test_the_run_of_a_trial_is_resumed_and_one_that_never_began_is_removed(order, tmp_path):
    order = replace(order, may_exist=True)
    assert carried_out(order, tmp_path) == ["train"]
    folder = order.directory.path
    folder.mkdir(parents=True)
    (folder / "run.json").write_text('{"ended": null}')
    assert carried_out(order, tmp_path) == ["train"] and not folder.exists()
    folder.mkdir()
    (folder / "notes.txt").write_text("")
    assert carried_out(order, tmp_path) == ["resume"] and list(folder.iterdir()), "which refuses what is no run"
    (folder / "config.yaml").write_text("")
    assert carried_out(order, tmp_path) == ["resume"] and list(folder.iterdir())


def test_a_run_that_never_began_stays_while_a_process_holds_its_lock(order, tmp_path, monkeypatch):
    monkeypatch.setattr("qfleet.launch.run_process.ORPHAN_GRACE_S", 0.0)
    run = RunDirectory.create(order.config.run, "a")
    try:
        assert carried_out(replace(order, may_exist=True), tmp_path) == ["resume"] and run.path.exists()
    finally:
        run.unlock()
