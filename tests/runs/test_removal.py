"""`rm` removes only run directories that are not in use, and follows no links."""

from __future__ import annotations

import json
import os

import pytest

from qfleet.core.errors import UserError
from qfleet.launch.attempt import open_for_resume
from qfleet.runconfig.resolution import resolve
from qfleet.runs.directory import RunDirectory, RunSection
from qfleet.runs.lock import LockOwner
from qfleet.runs.removal import freed_by, remove_checkpoints, remove_run, require_removable


@pytest.fixture
def run(tmp_path):
    run = RunDirectory.create(RunSection(root=str(tmp_path / "runs"), name="x"), "x")
    run.config.write_text("seed: 1\n")
    run.metrics.write_text("{}\n")
    for name in ("best-000000000100", "step-000000000100", "step-000000000200", ".tmp-step-000000000300~1.a.b"):
        (run.checkpoints / name).mkdir(parents=True)
        (run.checkpoints / name / "data").write_bytes(b"x" * 50_000)
    run.conclude("total_steps")
    run.unlock()
    return run


def test_a_run_is_removed_and_what_links_in_it_lead_to_is_not(run, tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("precious")
    (run.path / "link").symlink_to(kept)
    (run.checkpoints / "step-link").symlink_to(kept)
    expected = freed_by(run, False)
    assert remove_run(run) == expected >= 200_000
    assert (kept / "file").read_text() == "precious" and list(run.path.parent.iterdir()) == []


@pytest.mark.parametrize("remove", [remove_run, remove_checkpoints])
def test_a_run_in_use_is_refused(run, remove):
    run.lock()
    with pytest.raises(UserError, match="is running: stop it first"):
        remove(run)
    (run.path / "lock").write_text("17.abc-1.some-other-host\n")
    with pytest.raises(UserError, match="is locked by another host and may be running"):
        remove(run)
    assert (run.checkpoints / "step-000000000200" / "data").exists()


def test_the_lock_of_a_dead_process_holds_nothing_up(run):
    owner = LockOwner.current()
    (run.path / "lock").write_text(f"{LockOwner(owner.host, owner.pid, 'another-1')}\n")
    remove_run(run)
    assert not run.path.exists()


def test_what_is_no_run_is_refused(run, tmp_path):
    link = tmp_path / "runs" / "link"
    link.symlink_to(run.path)
    with pytest.raises(UserError, match="link is a link to"):
        require_removable(RunDirectory(link))
    project = tmp_path / "project"
    (project / "checkpoints").mkdir(parents=True)
    (project / "config.yaml").write_text("")
    for record in (None, "", "{}", '{"id": "x"}', json.dumps({"id": 3, "attempts": []})):
        if record is not None:
            (project / "run.json").write_text(record)
        with pytest.raises(UserError, match="is not a run that qfleet can remove"):
            remove_run(RunDirectory(project))
    (run.path / "inner").mkdir()
    (run.path / "inner" / "config.yaml").write_text("")
    with pytest.raises(UserError, match=r"contains other runs \(inner\)"):
        remove_run(run)
    assert project.exists() and run.config.exists()


def test_the_best_policy_outlives_the_other_checkpoints_and_the_run_is_not_begun_again(run):
    expected = freed_by(run, True)
    assert remove_checkpoints(run) == expected >= 150_000
    assert os.listdir(run.checkpoints) == ["best-000000000100"] and run.metrics.exists()
    assert not (run.path / "lock").exists()
    with pytest.raises(UserError, match=r"checkpoints of .* were removed .* init_from="):
        open_for_resume(run, resolve("catch").config, _Stack())


class _Stack:
    def callback(self, function):
        self.function = function


def test_without_a_best_policy_checkpoints_are_kept(run):
    (run.checkpoints / "best-000000000100" / "data").unlink()
    (run.checkpoints / "best-000000000100").rmdir()
    with pytest.raises(UserError, match="has no best policy to keep"):
        remove_checkpoints(run)
    assert len(os.listdir(run.checkpoints)) == 3


def test_the_working_directory_can_be_removed(run, monkeypatch):
    monkeypatch.chdir(run.path)
    remove_run(RunDirectory.open("."))
    assert list(run.path.parent.iterdir()) == []


def test_what_cannot_be_removed_is_told(run, monkeypatch):
    monkeypatch.setattr("qfleet.runs.removal.shutil.rmtree", lambda folder, ignore_errors: None)
    with pytest.raises(UserError, match=r"could not be removed completely: the rest is in .*\.tmp-x~"):
        remove_run(run)
