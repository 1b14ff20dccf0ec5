"""A damaged or forged checkpoint is found before anything of it is believed; nothing in it is ever executed."""

from __future__ import annotations

import errno
import json
import logging
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_kit import contents, forge_file, rewrite_manifest, save

from qfleet.core.errors import UserError
from qfleet.runs.checkpoint import Checkpoint, CheckpointDamaged, Checkpoints, is_checkpoint, open_checkpoint

FILES = ["manifest.json", "policy.safetensors", "config.yaml", "state.json", "state.safetensors", "replay-0-3.seg"]


@pytest.mark.parametrize("name", FILES)
def test_every_truncation_is_found(tmp_path, name):
    path = save(Checkpoints(tmp_path, keep=2), 1)
    whole = (path / name).read_bytes()
    for length in sorted({0, 1, 7, 8, 9, len(whole) // 2, len(whole) - 1}):
        (path / name).write_bytes(whole[:length])
        with pytest.raises(UserError, match=name):
            open_checkpoint(path)
    (path / name).write_bytes(whole)
    open_checkpoint(path)


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_byte_is_found(tmp_path, name):
    path = save(Checkpoints(tmp_path, keep=2), 1)
    before = open_checkpoint(path).manifest
    whole = (path / name).read_bytes()
    for offset in sorted({*range(0, len(whole), max(1, len(whole) // 60)), len(whole) - 1}):
        for bit in (0x01, 0x80):
            (path / name).write_bytes(whole[:offset] + bytes([whole[offset] ^ bit]) + whole[offset + 1:])
            if name == "manifest.json" and same_json(path / name, whole):
                assert open_checkpoint(path).manifest == before  # a blank for a tab and the like
                continue
            with pytest.raises(CheckpointDamaged, match=name):
                open_checkpoint(path)


def same_json(path: Path, whole: bytes) -> bool:
    try:
        return json.loads(path.read_bytes()) == json.loads(whole)
    except ValueError:
        return False


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_or_one_that_is_no_file_is_found(tmp_path, name):
    path = save(Checkpoints(tmp_path, keep=2), 1)
    (path / name).rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointDamaged, match=name):
        open_checkpoint(path)
    (path / name).mkdir()
    with pytest.raises(CheckpointDamaged, match=name):
        open_checkpoint(path)
    (path / name).rmdir()
    os.mkfifo(path / name)  # opening it would wait for ever
    with pytest.raises(CheckpointDamaged, match=name):
        open_checkpoint(path)
    (path / name).unlink()
    (path / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointDamaged, match=f"{name} is not a regular file"):
        open_checkpoint(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    path = save(Checkpoints(tmp_path, keep=2), 1)
    real = Path.open

    def refuse(self, *args, **kwargs):
        if self.name == "state.json":
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CheckpointDamaged, match=r"state.json cannot be read \(Permission denied\)"):
        open_checkpoint(path)


def test_the_newest_valid_one_wins_and_damaged_ones_are_set_aside(tmp_path, caplog):
    checkpoints = Checkpoints(tmp_path, keep=5)
    for step in (1, 2, 3, 4):
        save(checkpoints, step, [f"replay-{step}"])
    (tmp_path / "step-000000000004" / "policy.safetensors").write_bytes(b"")
    (tmp_path / "step-000000000003" / "manifest.json").unlink()
    (tmp_path / "step-000000000009").mkdir()
    (tmp_path / "step-000000000003.corrupt").mkdir()  # the name is taken
    before = contents(tmp_path / "step-000000000004")
    reader = checkpoints.newest(set_aside=False)
    assert reader.manifest.step == 2 and (tmp_path / "step-000000000009").exists()
    with caplog.at_level(logging.WARNING):
        assert checkpoints.newest().manifest.step == 2
    assert {path.name for path in tmp_path.iterdir()} == {
        "step-000000000001", "step-000000000002", "step-000000000003.corrupt", "step-000000000003.corrupt-2",
        "step-000000000004.corrupt", "step-000000000009.corrupt"}
    assert contents(tmp_path / "step-000000000004.corrupt") == before
    assert "step-000000000004 is damaged (policy.safetensors has 0 bytes" in caplog.text
    caplog.clear()
    assert checkpoints.newest().manifest.step == 2 and caplog.text == ""


def test_nothing_valid_is_none(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    os.truncate(save(checkpoints, 1) / "state.json", 1)
    assert checkpoints.newest() is None
    assert Checkpoints(tmp_path / "absent", keep=1).newest() is None


def test_a_newer_format_is_refused_not_set_aside(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    path = save(checkpoints, 1)
    rewrite_manifest(path, lambda body: body.update(format_version=4, qfleet="9.0.0", unknown=[1]))
    for read in (lambda: open_checkpoint(path), checkpoints.newest):
        with pytest.raises(UserError, match=r"has format 4, written by qfleet 9.0.0.*reads up to format 3"):
            read()
    assert path.exists()


def test_other_things_are_not_checkpoints(tmp_path):
    (tmp_path / "file").write_text("hello")
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "model.pt").write_bytes(b"PK")
    for name, words in (("file", "no checkpoint"), ("absent", "no checkpoint"), ("empty", "no manifest.json"),
                        ("foreign", "no manifest.json")):
        with pytest.raises(UserError, match=words):
            open_checkpoint(tmp_path / name)
        assert not is_checkpoint(tmp_path / name)
    assert is_checkpoint(save(Checkpoints(tmp_path, keep=1), 1))


@pytest.mark.parametrize("text", [
    "", "null", "[]", "3", '"x"', "{}", "{", "[" * 100_000, '{"a":' * 100_000, '{"sha256": 1}', '{"sha256": "00"}',
    "9" * 5000, "\udce4", "NaN",
])
def test_a_manifest_of_nonsense(tmp_path, text):
    path = save(Checkpoints(tmp_path, keep=2), 1)
    (path / "manifest.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(CheckpointDamaged, match=r"manifest\.json"):
        open_checkpoint(path)


@pytest.mark.parametrize("change", [
    lambda body: body["files"].update({"../../etc/passwd": {"size": 1, "sha256": "0" * 64}}),
    lambda body: body["files"].update({"/etc/passwd": {"size": 1, "sha256": "0" * 64}}),
    lambda body: body["files"].update({"code.py": {"size": 1, "sha256": "0" * 64}}),
    lambda body: body["files"].update({"x/../replay.seg": {"size": 1, "sha256": "0" * 64}}),
    lambda body: body["files"].update({"replay.seg\n": {"size": 1, "sha256": "0" * 64}}),
    lambda body: body["files"]["config.yaml"].update(size=-1),
    lambda body: body["files"]["config.yaml"].update(size=10**30),
    lambda body: body["files"]["config.yaml"].update(size="30"),
    lambda body: body["files"]["config.yaml"].update(sha256="x"),
    lambda body: body["files"].pop("policy.safetensors"),
    lambda body: body["files"].pop("state.json"),
    lambda body: body.update(files=[]),
    lambda body: body.update(step=-1),
    lambda body: body.update(step="12"),
    lambda body: body.update(kind="other"),
    lambda body: body.update(format_version=0),
    lambda body: body.update(format_version="one"),
    lambda body: body.pop("format_version"),
    lambda body: body.pop("env"),
])
def test_a_forged_manifest_is_refused(tmp_path, change):
    path = save(Checkpoints(tmp_path, keep=2), 1)
    rewrite_manifest(path, change)
    with pytest.raises(UserError):
        open_checkpoint(path)


def test_a_forged_environment_is_refused(tmp_path):
    path = save(Checkpoints(tmp_path, keep=2), 1)
    for env in ({}, {"id": "x", "observation": [], "actions": 1, "frames_per_step": 1},
                {"id": "x", "observation": {"a": {"evil": 1}}, "actions": 1, "frames_per_step": 1}):
        rewrite_manifest(path, lambda body, env=env: body.update(env=env))
        with pytest.raises(CheckpointDamaged):
            _ = open_checkpoint(path).spec


class Bomb:
    """Unpickling this touches a file."""

    def __init__(self, sentinel: Path) -> None:
        self.sentinel = sentinel

    def __reduce__(self):
        return Path.touch, (self.sentinel,)


def test_nothing_is_ever_executed(tmp_path):
    sentinel = tmp_path / "sentinel"
    pickled = pickle.dumps(Bomb(sentinel))
    torch.save({"weight": Bomb(sentinel)}, tmp_path / "bomb.pt")
    np.save(tmp_path / "bomb.npy", np.array([Bomb(sentinel)], dtype=object), allow_pickle=True)
    pickle.loads(pickled)
    assert sentinel.exists()  # the payload works
    sentinel.unlink()
    payloads = [pickled, (tmp_path / "bomb.pt").read_bytes(), (tmp_path / "bomb.npy").read_bytes()]
    for number, payload in enumerate(payloads):
        for name in ("policy.safetensors", "state.safetensors", "state.json"):
            path = save(Checkpoints(tmp_path / f"{number}-{name}", keep=1), 1)
            forge_file(path, name, payload)
            found = open_checkpoint(path)  # the hashes are right
            with pytest.raises(CheckpointDamaged, match=name):
                found.policy()
                found.state()
    assert not sentinel.exists()


def test_config_is_text_here_whatever_it_holds(tmp_path):
    sentinel = tmp_path / "sentinel"
    bomb = f"!!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path [{sentinel}]]\n"
    bomb += "a: &a [x, x]\n"
    bomb += "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefghij", "bcdefghijk", strict=True))
    path = save(Checkpoints(tmp_path, keep=1), 1)
    forge_file(path, "config.yaml", bomb.encode())
    assert open_checkpoint(path).config_text == bomb
    assert not sentinel.exists()
    forge_file(path, "config.yaml", b"\xff\xfe\x00")
    with pytest.raises(CheckpointDamaged, match="not UTF-8"):
        _ = open_checkpoint(path).config_text


def test_forged_state_is_refused(tmp_path):
    path = save(Checkpoints(tmp_path, keep=1), 1)
    for document in (b"[" * 1_000_000, b'{"$tensor": "absent"}', b"{", b"\xff", b"9" * 5000):
        forge_file(path, "state.json", document)
        with pytest.raises(CheckpointDamaged, match=r"state\.json"):
            open_checkpoint(path).state()


def test_absurd_sizes_are_refused_unread(tmp_path):
    path = save(Checkpoints(tmp_path, keep=1), 1)
    for name, size in (("state.json", 2**25), ("config.yaml", 2**21), ("policy.safetensors", 2**40)):
        with (path / name).open("wb") as file:
            file.truncate(size)  # sparse: takes no room
        rewrite_manifest(path, lambda body, name=name, size=size: body["files"][name].update(size=size))
        with pytest.raises(CheckpointDamaged, match=f"{name} has .* is the limit"):
            open_checkpoint(path)
        shutil.rmtree(path)
        path = save(Checkpoints(tmp_path, keep=1), 1)
    os.truncate(path / "manifest.json", 2**25)
    with pytest.raises(CheckpointDamaged, match=r"manifest.json has .* is the limit"):
        open_checkpoint(path)


def test_a_checkpoint_can_be_opened_unverified(tmp_path):
    path = save(Checkpoints(tmp_path, keep=1), 1)
    (path / "replay-0-3.seg").write_bytes(b"")
    found = open_checkpoint(path, verify=False)
    assert isinstance(found, Checkpoint) and found.state()["step"] == 1
    with pytest.raises(CheckpointDamaged, match=r"replay-0-3.seg has 0 bytes instead of 300"):
        found.verify()
