"""What is saved is read back, rotated, shared and exported."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from checkpoint_kit import META, POLICY, SPEC, STATE, save

from qfleet.core.errors import UserError
from qfleet.runs import checkpoint as module
from qfleet.runs.checkpoint import CheckpointMeta, Checkpoints, export_policy, open_checkpoint

GOLDEN = Path(__file__).parent / "golden"


def test_what_is_saved_is_read_back(tmp_path):
    path = save(Checkpoints(tmp_path, keep=2), 12345)
    assert path == tmp_path / "step-000000012345"
    found = open_checkpoint(path)
    assert (found.manifest.step, found.manifest.updates, found.manifest.kind) == (12345, 6172, "full")
    assert found.spec == SPEC
    assert found.config_text == META.config
    assert found.manifest.notes == {"eval/mean_reward": 487.5}
    policy, state = found.policy(), found.state()
    assert all(torch.equal(policy[name], POLICY[name]) and policy[name].dtype == POLICY[name].dtype for name in POLICY)
    assert state["rng"] == STATE["rng"] and state["step"] == 12345
    assert np.array_equal(state["priorities"], STATE["priorities"])
    assert torch.equal(state["optimizer"]["state"][0]["step"], torch.tensor(3.0))
    assert [(name, file.read_bytes()) for name, file in found.segments()] == [
        (name, name.encode() * 30) for name in ("replay-0-3", "replay-4-7")]


def test_weights_are_kept_once_however_often_a_run_holds_them(tmp_path):
    """The policy's in its own file, all others once beside it; what is read back shares no memory."""
    policy = {"weight": torch.arange(1000.0), "bias": torch.zeros(7)}
    state = {"net": policy, "target": {"weight": torch.arange(1000.0) + 1, "bias": torch.zeros(7)},
             "actor": {"weights": {"weight": torch.arange(1000.0) + 1}, "obs": np.zeros(7, np.float32)}}
    found = open_checkpoint(Checkpoints(tmp_path, keep=1).save(1, 1, policy, state, [], META))
    kept = safetensors.torch.load_file(found.path / "state.safetensors")
    assert [value.tolist() for value in kept.values()] == [(policy["weight"] + 1).tolist()]
    again = found.state()
    again["net"]["bias"][0] = again["actor"]["obs"][1] = again["target"]["weight"][2] = 9
    assert again["target"]["bias"].tolist() == [0] * 7 and again["actor"]["obs"].tolist() == [0, 9, *[0] * 5]
    assert torch.equal(again["actor"]["weights"]["weight"], torch.arange(1000.0) + 1)
    assert again["actor"]["obs"].dtype == np.float32 and torch.equal(again["net"]["weight"], policy["weight"])


def test_the_manifest_says_the_truth(tmp_path):
    path = save(Checkpoints(tmp_path, keep=2), 1)
    files = json.loads((path / "manifest.json").read_text())["files"]
    assert set(files) == {file.name for file in path.iterdir()} - {"manifest.json"}
    for name, entry in files.items():
        data = (path / name).read_bytes()
        assert entry == {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def test_newest_is_by_number_and_rotation_keeps_the_newest(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.newest() is None
    for step in (9, 10, 2_000_000_000_000, 2**41):
        save(checkpoints, step)
    assert [path.name for path in checkpoints.series()] == ["step-2000000000000", f"step-{2**41}"]
    assert checkpoints.newest().manifest.step == 2**41
    assert not list(tmp_path.glob(".tmp-*"))


@pytest.mark.parametrize("keep", [1, 2, 3, 6, 9])
def test_rotation_keeps_as_many_as_told(tmp_path, keep):
    checkpoints = Checkpoints(tmp_path, keep)
    for count in range(1, 8):
        save(checkpoints, count)
        assert [int(path.name[5:]) for path in checkpoints.series()] == list(range(1, count + 1))[-keep:]


def test_saving_twice_at_one_step_never_leaves_a_moment_without(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    first = save(checkpoints, 5)
    second = save(checkpoints, 5)
    third = save(checkpoints, 5)
    assert not first.exists() and not second.exists()
    assert checkpoints.newest().path == third == tmp_path / "step-000000000005-3"


def test_what_was_just_written_stays_also_after_a_step_back(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    for step in (100, 50):  # a resumed run may find its best anew at an earlier step
        saved, best = save(checkpoints, step), checkpoints.save_policy(step, step, POLICY, META)
    assert checkpoints.newest().path == saved and checkpoints.newest("best").path == best
    assert best.name == "best-000000000050"


def test_best_is_apart_and_replaced(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    save(checkpoints, 10)
    checkpoints.save_policy(10, 5, POLICY, META)
    best = checkpoints.save_policy(20, 10, POLICY, META)
    save(checkpoints, 30)
    assert {path.name for path in tmp_path.iterdir()} == {"best-000000000020", "step-000000000030"}
    found = checkpoints.newest("best")
    assert found.path == best and found.manifest.kind == "policy"
    assert torch.equal(found.policy()["weight"], POLICY["weight"]) and found.segments() == []
    with pytest.raises(UserError, match="contains only the policy and cannot be resumed"):
        found.state()
    with pytest.raises(ValueError):
        checkpoints.save_policy(20, 10, POLICY, META, name="step")
    with pytest.raises(ValueError):
        checkpoints.save_policy(20, 10, POLICY, META, name="../up")


def test_replay_files_are_shared_with_the_checkpoint_before(tmp_path):
    checkpoints, calls = Checkpoints(tmp_path, keep=2), []
    first = save(checkpoints, 1, ["replay-a", "replay-b"], calls)
    second = save(checkpoints, 2, ["replay-b", "replay-c"], calls)
    assert calls == ["replay-a", "replay-b", "replay-c"]
    assert (first / "replay-b.seg").stat().st_ino == (second / "replay-b.seg").stat().st_ino
    assert not (second / "replay-a.seg").exists()
    save(checkpoints, 3, ["replay-c"])
    assert not first.exists()
    open_checkpoint(second)


def test_after_a_resume_only_the_checkpoint_followed_is_shared_from(tmp_path):
    save(Checkpoints(tmp_path, keep=3), 1)
    fresh, calls = Checkpoints(tmp_path, keep=3), []
    save(fresh, 2, calls=calls)  # another line of descent may have other bytes under these names
    assert calls == ["replay-0-3", "replay-4-7"]
    resumed, calls = Checkpoints(tmp_path, keep=3), []
    resumed.resume_from(resumed.newest())
    path = save(resumed, 3, calls=calls)
    assert calls == []
    assert os.path.samefile(path / "replay-0-3.seg", tmp_path / "step-000000000002" / "replay-0-3.seg")


@pytest.mark.parametrize("trouble", ["gone", "cut", "rotten", "no links here"])
def test_what_cannot_be_shared_is_written_again(tmp_path, trouble, monkeypatch):
    checkpoints, calls = Checkpoints(tmp_path, keep=2), []
    file = save(checkpoints, 1) / "replay-0-3.seg"
    if trouble == "gone":
        file.unlink()
    elif trouble == "cut":
        os.truncate(file, 10)
    elif trouble == "rotten":
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    else:
        def refuse(*args, **kwargs):
            raise OSError(errno.EPERM, "no hard links")
        monkeypatch.setattr(os, "link", refuse)
    open_checkpoint(save(checkpoints, 2, calls=calls))
    assert "replay-0-3" in calls


def test_what_is_shared_is_read_once(tmp_path, monkeypatch):
    checkpoints, hashed, file_digest = Checkpoints(tmp_path, keep=1), [], hashlib.file_digest
    save(checkpoints, 1, ["replay-a"])

    def digest(stream, kind):
        hashed.append(stream.name)
        return file_digest(stream, kind)

    monkeypatch.setattr(hashlib, "file_digest", digest)
    for step in (2, 3, 4):
        save(checkpoints, step, ["replay-a"])
    assert hashed == [str(tmp_path / "step-000000000001" / "replay-a.seg")]


def test_segment_names_cannot_leave_the_directory(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    for name in ("../evil", "a/b", ".hidden", "", "manifest.json/.."):
        with pytest.raises(ValueError):
            save(checkpoints, 1, [name])
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_every_format_ever_written_is_still_read():
    for path in sorted(GOLDEN.iterdir()):
        found = open_checkpoint(path)
        assert found.spec == SPEC
        assert torch.equal(found.policy()["weight"], POLICY["weight"])
        state = found.state()
        assert state["rng"] == STATE["rng"] and np.array_equal(state["priorities"], STATE["priorities"])
        for weights in (state.get("net", POLICY), state.get("published", {"state": POLICY})["state"]):  # since format 2
            assert all(torch.equal(weights[name], POLICY[name]) for name in POLICY)
        assert [file.read_bytes() for _, file in found.segments()] == [b"replay-0-3" * 30, b"replay-4-7" * 30]
    assert (GOLDEN / f"format-{module.FORMAT_VERSION}").is_dir()


def test_a_state_too_large_to_be_read_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setitem(module.LIMITS, "state.json", 1000)
    with pytest.raises(ValueError, match="store large state in arrays"):
        Checkpoints(tmp_path, keep=1).save(1, 1, POLICY, {"list": list(range(1000))}, [], META)
    assert list(tmp_path.iterdir()) == []


def test_a_moved_run_keeps_its_checkpoints(tmp_path):
    save(Checkpoints(tmp_path / "old", keep=2), 7)
    (tmp_path / "old").rename(tmp_path / "new")
    moved = Checkpoints(tmp_path / "new", keep=2)
    found = moved.newest()
    assert found.state()["step"] == 7
    moved.resume_from(found)
    assert os.path.samefile(save(moved, 8) / "replay-0-3.seg", found.path / "replay-0-3.seg")


def test_export_writes_the_policy_alone(tmp_path):
    source = open_checkpoint(save(Checkpoints(tmp_path, keep=1), 7))
    out = export_policy(source, tmp_path / "deep" / "out")
    found = open_checkpoint(out)
    assert found.manifest.kind == "policy" and found.manifest.step == 7 and found.spec == SPEC
    assert found.config_text == META.config and found.manifest.notes == source.manifest.notes
    assert torch.equal(found.policy()["weight"], POLICY["weight"])
    assert {file.name for file in out.iterdir()} == {"manifest.json", "policy.safetensors", "config.yaml"}
    with pytest.raises(UserError, match="exists already"):
        export_policy(source, out)
    with pytest.raises(UserError, match="cannot write"):
        export_policy(source, "/proc/nowhere/out")


def test_figures_that_are_not_finite_are_noted_as_unknown(tmp_path):
    path = Checkpoints(tmp_path, keep=1).save_policy(
        1, 1, POLICY, CheckpointMeta("", SPEC, {"score": float("nan"), "other": 2})
    )
    assert open_checkpoint(path).manifest.notes == {"score": None, "other": 2.0}


def test_keep_must_be_positive(tmp_path):
    with pytest.raises(ValueError, match="keep=0"):
        Checkpoints(tmp_path, keep=0)
