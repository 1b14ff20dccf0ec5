"""Summaries of runs: state, progress and size, of whole, broken and strange directories."""

from __future__ import annotations

import json
import os
import sys
from subprocess import run as execute

import pytest

from qfleet.core.errors import UserError
from qfleet.runs.disk_space import disk_usage
from qfleet.runs.listing import TAIL_BYTES, list_runs, scan_runs
from qfleet.runs.lock import LockOwner

CONFIG = "seed: 3\ndevice: cpu\ntotal_steps: 900\nenv:\n  id: CartPole-v1\n  kwargs: {}\nagent:\n  algo: c51\n"


def make(root, name, ended, records=(), started="2026-01-01T10:00:00+00:00"):
    path = root / name
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(CONFIG)
    (path / "run.json").write_text(json.dumps({"id": "x", "attempts": [{"started": started}], "ended": ended}))
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_a_summary_says_what_a_list_shows(tmp_path):
    path = make(tmp_path, "x", {"reason": "total_steps"},
                [{"step": 400, "eval/best_reward": 7.5}, {"step": 900, "rollout/ep_rew_mean": 3.0}])
    [found] = list_runs(tmp_path)
    assert (found.name, found.path, found.state) == ("x", path, "finished")
    assert (found.env, found.agent, found.seed) == ("CartPole-v1", "c51", 3)
    assert (found.steps, found.total_steps, found.best) == (900, 900, 7.5)
    assert found.bytes == disk_usage(path).bytes > 0 and found.active >= found.started


def test_an_object_as_environment_is_shown_by_its_name(tmp_path):
    path = make(tmp_path, "x", None)
    (path / "config.yaml").write_text("env:\n  id: object:015933-1:lambda\n")
    assert list_runs(tmp_path)[0].env == "lambda"


@pytest.mark.parametrize(("ended", "state"), [
    ({"reason": "stop_at"}, "finished"), ({"reason": "interrupted"}, "interrupted"),
    ({"reason": "preempted"}, "interrupted"), ({"reason": "failed", "error": "x"}, "failed"), (None, "crashed"),
    ({"reason": "pruned"}, "pruned"), ({"reason": "stopped"}, "stopped")])
def test_how_a_run_ended_is_its_state(tmp_path, ended, state):
    make(tmp_path, "x", ended)
    assert [run.state for run in list_runs(tmp_path)] == [state]


def test_a_locked_run_is_running_here_or_elsewhere(tmp_path):
    path = make(tmp_path, "x", {"reason": "pruned"})
    (path / "lock").write_text(f"{LockOwner.current()}\n")
    assert list_runs(tmp_path)[0].state == "running"
    (path / "lock").write_text("17.abc-1.some-other-host\n")
    assert list_runs(tmp_path)[0].state == "elsewhere"


def test_a_run_that_has_just_been_created_is_listed(tmp_path):
    path = make(tmp_path, "x", None)
    (path / "config.yaml").unlink()
    (path / "lock").write_text(f"{LockOwner.current()}\n")
    [found] = list_runs(tmp_path)
    assert (found.state, found.env, found.steps, found.best) == ("running", None, 0, None)


def test_the_newest_run_is_first(tmp_path):
    for name, day in (("a", 2), ("b", 3), ("c", 1)):
        make(tmp_path, name, None, started=f"2026-01-0{day}T10:00:00+00:00")
    assert [run.name for run in list_runs(tmp_path)] == ["b", "a", "c"]


def test_rare_evaluations_are_found_in_long_files(tmp_path):
    rows = [{"step": step, "train/loss": 0.123456789} for step in range(3 * TAIL_BYTES // 30)]
    rows[5:5] = [{"step": 5, "eval/best_reward": 1.0}, {"step": 6, "eval/best_reward": -2.5}]
    path = make(tmp_path, "x", None, rows)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99999')  # the rest was lost
    [found] = list_runs(tmp_path)
    assert (path / "metrics.jsonl").stat().st_size > 2 * TAIL_BYTES
    assert (found.steps, found.best) == (rows[-1]["step"], -2.5)


def test_broken_runs_are_skipped_with_a_note_and_others_are_listed(tmp_path):
    make(tmp_path, "fine", None)
    (make(tmp_path, "lost", None) / "config.yaml").unlink()
    (make(tmp_path, "torn", None) / "config.yaml").write_text("env: [\n")
    secret = make(tmp_path, "linked", None) / "config.yaml"
    secret.unlink()
    secret.symlink_to(tmp_path / "fine" / "config.yaml")
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / ".tmp-x").mkdir()
    make(tmp_path / "group", "inner", None)
    found, notes = scan_runs(tmp_path)
    assert [run.name for run in found] == ["fine"]
    assert [note.partition(":")[0] for note in notes] == [
        f"{tmp_path}/group contains 1 more run", *(f"skipped {tmp_path}/{name}" for name in ("linked", "lost", "torn"))]


def test_a_missing_root_has_no_runs_and_a_file_is_refused(tmp_path):
    assert list_runs(tmp_path / "absent") == []
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file is a file, not a folder of runs"):
        list_runs(tmp_path / "file")


def test_a_list_needs_no_torch():
    code = "import sys, qfleet.runs.listing, qfleet.runs.removal; sys.exit('torch' in sys.modules)"
    assert execute([sys.executable, "-c", code], timeout=60).returncode == 0


def test_files_with_several_names_count_once_and_are_freed_only_with_their_last_name(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "a").write_bytes(b"x" * 100_000)
    once = disk_usage(run)
    os.link(run / "a", run / "b")
    assert disk_usage(run) == once and once.bytes == once.freed >= 100_000
    os.link(run / "a", tmp_path / "outside")
    (run / "link").symlink_to("/")
    assert disk_usage(run).bytes >= once.bytes and disk_usage(run).freed < 100_000
