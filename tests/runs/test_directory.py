"""A run has one folder and one writer; it is found by path or name, and says what it was made with."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
from datetime import datetime
from pathlib import Path

import pytest
from pydantic import ValidationError

from qfleet.core.errors import UserError
from qfleet.runs import directory as module
from qfleet.runs import trust
from qfleet.runs.directory import (
    RunDirectory,
    RunSection,
    default_name,
    describe_machine,
    replace_text,
)
from qfleet.runs.lock import LockOwner
from qfleet.runs.names import run_names


def section(root: Path, name: str | None = None) -> RunSection:
    return RunSection(root=str(root), name=name)


def made(root: Path, name: str) -> RunDirectory:
    run = RunDirectory.create(section(root, name), "default")
    run.config.write_text("seed: 1\n")
    run.unlock()
    return run


def test_a_run_lives_in_root_slash_name(tmp_path):
    run = RunDirectory.create(section(tmp_path / "a" / "b", "mine"), "default")
    assert run.path == tmp_path / "a" / "b" / "mine" and run.name == "mine"
    paths = [run.config, run.record, run.metrics,
             run.tensorboard, run.checkpoints, run.videos, run.plots]
    assert [path.name for path in paths] == [
        "config.yaml", "run.json", "metrics.jsonl", "tb", "checkpoints", "videos", "plots"]
    assert {path.parent for path in paths} == {run.path}


def test_a_default_name_is_safe_and_never_taken(tmp_path):
    now = datetime(2026, 11, 15, 7, 56, 3)
    assert default_name("ALE/Pong-v5", "dqn", 3, now) == "ALE-Pong-v5__dqn__3__20261115-075603"
    for env_id in ("my_env:MyEnv", "../../etc/passwd", "a b;rm -rf $HOME", "Ünicode/Spiel-v0", "--x"):
        name = default_name(env_id, "my.module:agent", -1, now)
        assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", name), name
        assert RunSection(name=name).name == name
    names = [RunDirectory.create(section(tmp_path), "same").name for _ in range(3)]
    assert names == ["same", "same-2", "same-3"]


def test_a_chosen_name_that_exists_is_refused_with_the_remedy(tmp_path):
    made(tmp_path, "mine")
    with pytest.raises(UserError, match=r"run mine exists already .* `qfleet resume mine`, or choose another run.name"):
        RunDirectory.create(section(tmp_path, "mine"), "default")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/abs", "a\\b", "-x", " x", "x ", "a\nb", "~x", "c:x",
                                  "ä" * 101])
def test_a_name_is_one_folder(name):
    with pytest.raises(ValidationError, match="run name"):
        RunSection(name=name)


def test_ordinary_names_are_taken():
    for name in ("cartpole", "a b", "Füße", "x=1,y=2", "seed.3", "x" * 200):
        assert RunSection(name=name).name == name


def test_a_root_that_cannot_be_written_to_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/qfleet-runs")):
        with pytest.raises(UserError, match=r"cannot write the run .*run\.root"):
            RunDirectory.create(section(root), "default")


def test_runs_are_found_by_path_and_by_name(tmp_path, monkeypatch):
    run = made(tmp_path / "runs", "cartpole-1")
    monkeypatch.chdir(tmp_path)
    for where in (run.path, str(run.path) + "/", "runs/cartpole-1", "cartpole-1"):
        assert RunDirectory.open(where).path.resolve() == run.path
    assert RunDirectory.open("cartpole-1", tmp_path / "runs").path == run.path
    monkeypatch.chdir(run.path)
    assert RunDirectory.open(".").name == "cartpole-1"


def test_a_folder_of_the_same_name_does_not_hide_a_run(tmp_path, monkeypatch):
    run = made(tmp_path / "runs", "pong")
    (tmp_path / "pong").mkdir()
    monkeypatch.chdir(tmp_path)
    assert RunDirectory.open("pong").path.resolve() == run.path


def test_an_unknown_run_gets_close_matches(tmp_path):
    with pytest.raises(UserError, match=f"there are no runs in {tmp_path} yet"):
        RunDirectory.open("cartpole", tmp_path)
    made(tmp_path, "cartpole-7")
    made(tmp_path, "pong")
    (tmp_path / "cartpole-8").mkdir()  # not a run
    with pytest.raises(UserError, match=r"no run 'cartpol-7'.*did you mean cartpole-7\?"):
        RunDirectory.open("cartpol-7", tmp_path)
    for word in ("Pon", "somewhere/pnog", "CARTPOLE"):
        with pytest.raises(UserError, match=rf"did you mean {'cartpole-7' if word == 'CARTPOLE' else 'pong'}\?"):
            RunDirectory.open(word, tmp_path)
    for word in ("", "breakout", "x" * 300):
        expected = f"no run '{word}'.*{tmp_path} contains no run with a similar name"
        with pytest.raises(UserError, match=expected) as caught:
            RunDirectory.open(word, tmp_path)
        assert "pong" not in str(caught.value) and "cartpole" not in str(caught.value)
    assert sorted(run_names(tmp_path)) == ["cartpole-7", "pong"]


def test_a_moved_run_works_as_before(tmp_path):
    run = made(tmp_path / "runs", "old")
    run.path.rename(tmp_path / "new")
    moved = RunDirectory.open(tmp_path / "new")
    moved.lock()
    moved.add_attempt({"n": 1})
    moved.unlock()
    assert moved.name == "new" and moved.record.exists()


def test_one_process_cannot_write_twice(tmp_path):
    run = RunDirectory.create(section(tmp_path, "mine"), "default")
    with pytest.raises(UserError, match=r"another run writes here: .* in use by this process"):
        RunDirectory(run.path).lock()
    run.unlock()
    assert not (run.path / "lock").exists()
    run.lock()


HOLD = """
import sys
from qfleet.runs.directory import RunDirectory
from qfleet.core.errors import UserError
from pathlib import Path
try:
    RunDirectory(Path(sys.argv[1])).lock()
except UserError as error:
    print(error, flush=True)
    raise SystemExit(2)
print("locked", flush=True)
sys.stdin.read()
"""


def hold(path: Path) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                            text=True)


@pytest.mark.slow
def test_two_processes_cannot_write_to_one_run(tmp_path):
    run = made(tmp_path, "mine")
    first = hold(run.path)
    try:
        assert first.stdout.readline() == "locked\n"
        second = hold(run.path)
        out, _ = second.communicate(timeout=60)
        assert second.returncode == 2
        assert f"another run writes here: {run.path} is in use by process {first.pid} on {platform.node()}" in out
        with pytest.raises(UserError, match=f"process {first.pid}"):
            run.lock()
    finally:
        first.kill()
    os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)
    run.lock()  # dead, though nobody has waited for it yet: a zombie writes nothing
    first.communicate(timeout=60)
    assert LockOwner.parse((run.path / "lock").read_text()) == LockOwner.current()


def test_stale_locks_are_taken_over(tmp_path):
    run = made(tmp_path, "mine")
    dead = subprocess.Popen(["true"])
    dead.wait(timeout=30)
    host, pid = platform.node(), os.getpid()
    reborn = LockOwner(host, pid, "00000000-1")  # our number, given to another process before us
    for text in (
        str(LockOwner(host, dead.pid, "")), str(reborn), str(LockOwner(host, 2**40, "")), "", "nonsense",
        "12", "\0"):
        (run.path / "lock").write_text(text)
        run.lock()
        assert LockOwner.parse((run.path / "lock").read_text()) == LockOwner.current()
        run.unlock()


def test_a_lock_of_another_host_is_respected(tmp_path):
    run = made(tmp_path, "mine")
    (run.path / "lock").write_text(str(LockOwner("far.away.example", 1, "")))
    with pytest.raises(UserError, match=r"process 1 on far\.away\.example; if that process is gone, delete .*/lock"):
        run.lock()
    run.unlock()
    assert (run.path / "lock").exists()


def test_of_many_takers_of_a_stale_lock_one_wins(tmp_path, monkeypatch):
    run = made(tmp_path, "mine")
    (run.path / "lock").write_text("1..x")
    identity, wins = threading.local(), []
    monkeypatch.setattr(LockOwner, "current", staticmethod(lambda: LockOwner("here", identity.pid, "")))
    monkeypatch.setattr(LockOwner, "alive", lambda self: self.host == "here")

    def take(pid: int) -> None:
        identity.pid = pid
        try:
            run.lock()
        except UserError:
            return
        wins.append(pid)

    threads = [threading.Thread(target=take, args=(pid,)) for pid in range(2, 22)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(wins) == 1
    assert LockOwner.parse((run.path / "lock").read_text()).pid == wins[0]


def test_a_run_on_a_vanished_folder_cannot_be_locked(tmp_path):
    with pytest.raises(UserError, match="cannot lock the run"):
        RunDirectory(tmp_path / "gone").lock()


@pytest.mark.parametrize("host", ["host", "a.b.example", "", "with-dash"])
def test_an_owner_survives_its_text(host):
    owner = LockOwner(host, 42, "3f2a9c01-77")
    assert LockOwner.parse(str(owner)) == owner


def test_we_are_alive():
    assert LockOwner.current().alive() is True and LockOwner.current().start


def test_every_attempt_is_recorded(tmp_path):
    run = made(tmp_path, "mine")
    run.add_attempt({"n": 1})
    run.add_attempt({"n": 2})
    assert json.loads(run.record.read_text())["attempts"] == [{"n": 1}, {"n": 2}] and run.created_here()
    run.record.write_text("{ torn")
    run.add_attempt({"n": 3})
    assert json.loads(run.record.read_text()) == {"attempts": [{"n": 3}], "ended": None}
    assert {path.name for path in run.path.iterdir()} == {"config.yaml", "run.json"}


def test_a_run_is_at_home_until_it_is_copied(tmp_path):
    run = made(tmp_path, "mine")
    run.add_attempt({"n": 1})
    assert run.created_here()
    moved = RunDirectory(run.path.rename(tmp_path / "renamed"))
    (tmp_path / "link").symlink_to(moved.path)
    assert moved.created_here() and RunDirectory(tmp_path / "link").created_here()
    copy = RunDirectory(shutil.copytree(moved.path, tmp_path / "copy"))
    assert not copy.created_here()
    copy.add_attempt({"n": 2})
    assert not copy.created_here(), "going on with a copy does not make it ours"


@pytest.mark.parametrize("record", ["", "{ torn", "[]", "{}", '{"home": null}', '{"home": "0"}', "[" * 100_000])
def test_a_run_without_a_credible_record_is_not_at_home(tmp_path, record):
    run = made(tmp_path, "mine")
    run.record.write_text(record)
    assert not run.created_here()
    run.record.unlink()
    assert not run.created_here() and not RunDirectory(tmp_path / "absent").created_here()


def test_a_record_behind_a_link_proves_nothing(tmp_path):
    run = made(tmp_path, "mine")
    run.record.rename(tmp_path / "elsewhere.json")
    run.record.symlink_to(tmp_path / "elsewhere.json")
    assert not run.created_here(), "any file of this user may be behind a link"


@pytest.mark.parametrize("whose", ["folder", "record"])
def test_a_run_is_at_home_only_if_its_folder_and_record_are_this_users(tmp_path, whose):
    if os.getuid() != 0:
        pytest.skip("only root may give files away")
    run = made(tmp_path, "mine")
    os.chown(run.path if whose == "folder" else run.record, 12345, -1)
    assert not run.created_here()


def test_a_folder_that_gets_the_inode_of_a_deleted_run_is_not_that_run(tmp_path, monkeypatch):
    run = made(tmp_path, "mine")
    number, record = run.path.stat().st_ino, run.record.read_text()
    shutil.rmtree(run.path)
    others = [tmp_path / f"unpacked-{index}" for index in range(50)]
    for other in others:
        other.mkdir()
        (other / "run.json").write_text(record)
    same = [other for other in others if other.stat().st_ino == number]  # none where inodes are only counted up
    assert not any(RunDirectory(other).created_here() for other in same)
    run = made(tmp_path, "another")
    assert run.created_here()
    monkeypatch.setattr(trust, "_created", lambda folder: 0)
    assert not run.created_here(), "the same inode, created at another time"


def test_another_machine_is_another_home(tmp_path, monkeypatch):
    run = made(tmp_path, "mine")
    monkeypatch.setattr(trust, "_machine", lambda: "another")
    assert not run.created_here()


def test_a_run_whose_record_cannot_be_written_never_began(tmp_path, monkeypatch):
    def full(path, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "replace_text", full)
    with pytest.raises(UserError, match=r"cannot write the run .*No space left"):
        RunDirectory.create(section(tmp_path, "mine"), "default")
    assert list(tmp_path.iterdir()) == []


def test_text_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "file"
    replace_text(path, "old")

    def fail(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        replace_text(path, "new")
    assert path.read_text() == "old" and [item.name for item in tmp_path.iterdir()] == ["file"]


def test_describe_says_what_a_run_was_made_with(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["qfleet", "train", "cartpole"])
    found = json.loads(json.dumps(describe_machine()))
    assert found["command"] == ["qfleet", "train", "cartpole"]
    assert {"qfleet", "torch", "numpy", "gymnasium"} <= set(found["versions"])
    assert found["hardware"]["cores"] >= 1 and found["hardware"]["memory_bytes"] > 2**20
    assert datetime.fromisoformat(found["started"]).tzinfo is not None
    assert found["python"] == platform.python_version()


def test_git_says_commit_and_dirt(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert describe_machine()["git"] is None

    def git(*args: str) -> str:
        return subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x@example.org", *args], check=True,
                              capture_output=True, text=True, timeout=30).stdout.strip()

    git("init", "-q")
    (tmp_path / "file").write_text("a")
    git("add", "file")
    git("commit", "-q", "-m", "x")
    assert describe_machine()["git"] == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "file").write_text("b")
    assert describe_machine()["git"]["dirty"] is True


def test_a_git_that_hangs_or_is_missing_stops_nothing(monkeypatch):
    def hang(*args, **kwargs):
        raise subprocess.TimeoutExpired("git", 5)

    monkeypatch.setattr(module.subprocess, "run", hang)
    assert describe_machine()["git"] is None
    monkeypatch.undo()
    monkeypatch.setenv("PATH", "/nonexistent")
    assert describe_machine()["git"] is None
