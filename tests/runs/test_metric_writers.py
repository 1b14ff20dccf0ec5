"""Metric records reach their files, survive kills and full disks, and continue without doubles after a resume."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import shutil
import subprocess
import sys
import types

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from qfleet.core.errors import UserError
from qfleet.runs import metric_writers as module
from qfleet.runs.metric_writers import JsonlWriter, TensorBoardWriter, WandbWriter, read_metrics


def record(step: int, **figures) -> dict:
    return {"step": step, "frames": 4 * step, "updates": step // 2, "episodes": 1, "time_s": 0.5, **figures}


def scalars(folder, tag: str) -> list[tuple[int, float]]:
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


def no_space(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_records_are_readable_while_the_run_goes_on(tmp_path):
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    writer.write(record(1, **{"rollout/ep_rew_mean": 2.5}))
    writer.write(record(2))
    assert read_metrics(tmp_path / "metrics.jsonl") == [record(1, **{"rollout/ep_rew_mean": 2.5}), record(2)]
    writer.flush()
    writer.close()
    writer.close()


def test_figures_become_plain_json(tmp_path):
    writer = JsonlWriter(tmp_path / "m")
    writer.write({"step": np.int64(3), "a": np.float32(0.5), "b": torch.tensor(2.0), "nan": math.nan, "inf": -math.inf,
                  "tnan": torch.tensor(math.nan), "flag": True})
    text = (tmp_path / "m").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {
        "step": 3, "a": 0.5, "b": 2.0, "nan": None, "inf": None, "tnan": None, "flag": True}


def test_a_new_writer_appends_and_a_resumed_one_drops_the_future(tmp_path):
    path = tmp_path / "m"
    writer = JsonlWriter(path)
    for step in (10, 20, 30, 25, 40):
        writer.write(record(step))
    writer.close()
    JsonlWriter(path).close()
    assert len(read_metrics(path)) == 5
    writer = JsonlWriter(path, (25, 25))
    assert [item["step"] for item in read_metrics(path)] == [10, 20, 25]
    writer.write(record(26))
    writer.close()
    assert [item["step"] for item in read_metrics(path)] == [10, 20, 25, 26]
    assert [item.name for item in tmp_path.iterdir()] == ["m"]
    JsonlWriter(tmp_path / "fresh", (5, 1)).close()
    assert read_metrics(tmp_path / "fresh") == []


def test_updates_between_two_steps_are_the_future_too(tmp_path):
    """A learner whose actors are elsewhere goes on while no step arrives: a checkpoint is of one of those moments."""
    writer = JsonlWriter(tmp_path / "m")
    for moment in ((10, 5), (20, 10), (20, 14), (20, 15), (30, 16)):
        writer.write({"step": moment[0], "updates": moment[1]})
    writer.close()
    JsonlWriter(tmp_path / "m", (20, 14)).close()
    assert [(item["step"], item["updates"]) for item in read_metrics(tmp_path / "m")] == [(10, 5), (20, 10), (20, 14)]


@pytest.mark.parametrize("resume", [None, (100, 9)])
def test_a_torn_line_costs_itself_only(tmp_path, resume):
    path = tmp_path / "m"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "rollo')
    assert read_metrics(path) == [{"step": 1}]
    writer = JsonlWriter(path, resume)
    writer.write({"step": 3})
    writer.write({"step": 4})
    writer.close()
    assert read_metrics(path) == [{"step": 1}, {"step": 3}, {"step": 4}]


@given(cut=st.integers(0, 200), resume_step=st.one_of(st.none(), st.integers(0, 12)))
def test_a_kill_at_any_byte_loses_the_torn_line_only(tmp_path_factory, cut, resume_step):
    path = tmp_path_factory.mktemp("torn") / "m"
    whole = b"".join(json.dumps({"step": step, "x": step / 7}).encode() + b"\n" for step in range(10))
    path.write_bytes(whole[:cut])
    complete = [json.loads(line) for line in whole[:cut].splitlines() if line in whole.splitlines()]
    writer = JsonlWriter(path, None if resume_step is None else (resume_step, 0))
    writer.write({"step": 99})
    writer.close()
    kept = [item for item in complete if resume_step is None or item["step"] <= resume_step]
    assert read_metrics(path) == [*kept, {"step": 99}]


def test_the_reader_skips_what_is_not_a_record(tmp_path):
    (tmp_path / "m").write_bytes(b'\n[1]\n"x"\nnull\n{"step": "one"}\n\xff\xfe\n' + b"[" * 100_000 + b'\n{"step": 5}\n')
    assert read_metrics(tmp_path / "m") == [{"step": 5}]
    assert read_metrics(tmp_path / "absent") == []


def test_a_full_disk_costs_records_but_not_the_run(tmp_path, monkeypatch, caplog):
    path = tmp_path / "m"
    writer = JsonlWriter(path)
    writer.write(record(1))
    real, budget = os.write, [30]

    def almost_full(descriptor, data):
        if not budget[0]:
            no_space()
        written = real(descriptor, data[:budget[0]])
        budget[0] -= written
        return written

    clock = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(module.os, "write", almost_full)
        for step in range(2, 12):
            writer.write(record(step))
        assert len(caplog.records) == 1 and "No space left" in caplog.text
        clock[0] += 61
        writer.write(record(12))
        assert len(caplog.records) == 2 and "11 so far" in caplog.text
    writer.write(record(13))
    assert path.read_text() == "".join(json.dumps(record(step)) + "\n" for step in (1, 13))


def test_a_full_disk_at_resume_keeps_the_old_lines(tmp_path, monkeypatch, caplog):
    path = tmp_path / "m"
    path.write_text('{"step": 1}\n{"step": 9}\n')
    monkeypatch.setattr(module, "replace_text", no_space)
    writer = JsonlWriter(path, (5, 0))
    writer.write({"step": 6})
    assert [item["step"] for item in read_metrics(path)] == [1, 9, 6]
    assert "lines beyond step 5 could not be removed" in caplog.text


def test_a_flush_that_fails_is_a_warning(tmp_path, monkeypatch, caplog):
    writer = JsonlWriter(tmp_path / "m")
    monkeypatch.setattr(module.os, "fsync", no_space)
    writer.flush()
    assert "No space left" in caplog.text


def test_tensorboard_reads_the_scalars(tmp_path):
    writer = TensorBoardWriter(tmp_path / "tb")
    writer.write(record(10, **{"rollout/ep_rew_mean": 1.5, "train/loss": math.nan}))
    writer.write(record(20, **{"rollout/ep_rew_mean": torch.tensor(2.5), "train/loss": 0.25}))
    assert scalars(tmp_path / "tb", "rollout/ep_rew_mean") == [(10, 1.5), (20, 2.5)]  # before it is closed
    writer.flush()
    writer.close()
    writer.close()
    assert scalars(tmp_path / "tb", "train/loss") == [(20, 0.25)]
    assert scalars(tmp_path / "tb", "time/frames") == [(10, 40.0), (20, 80.0)]


def test_tensorboard_shows_no_step_twice_after_a_resume(tmp_path, monkeypatch):
    clock = [1_700_000_000.0]
    monkeypatch.setattr(module.time, "time", lambda: clock[0])
    first = TensorBoardWriter(tmp_path)
    for step in (10, 20, 30, 40):
        first.write({"step": step, "train/loss": step / 10})
    first.close()
    clock[0] += 100
    second = TensorBoardWriter(tmp_path, resume_step=20)
    for step in (30, 40, 50):
        second.write({"step": step, "train/loss": step})
    second.close()
    assert scalars(tmp_path, "train/loss") == [(10, 1.0), (20, 2.0), (30, 30.0), (40, 40.0), (50, 50.0)]


def test_tensorboard_on_a_full_disk_goes_on_in_a_new_file(tmp_path, monkeypatch, caplog):
    clock = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    writer = TensorBoardWriter(tmp_path)
    writer.write({"step": 1, "train/loss": 1.0})
    with monkeypatch.context() as patch:
        patch.setattr(module._FullWrites, "write", no_space)
        for step in range(2, 9):
            writer.write({"step": step, "train/loss": 1.0})
    assert len(caplog.records) == 1 and "No space left" in caplog.text
    writer.write({"step": 9, "train/loss": 1.0})  # within the minute: not tried
    clock[0] += 61
    writer.write({"step": 10, "train/loss": 3.0})
    writer.close()
    assert scalars(tmp_path, "train/loss") == [(1, 1.0), (10, 3.0)]
    assert len(list(tmp_path.iterdir())) == 2


def test_writers_on_a_disk_that_is_really_full(tmp_path, caplog):
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, timeout=30).returncode:
        pytest.skip("mounting is not permitted here; the faked full disk is tested above")
    try:
        sinks = [JsonlWriter(folder / "m"), TensorBoardWriter(folder / "tb")]
        for step in range(1000):
            for sink in sinks:
                sink.write(record(step, **{"rollout/ep_rew_mean": 1.0}))
        for sink in sinks:
            sink.flush()
            sink.close()
        steps = [item["step"] for item in read_metrics(folder / "m")]
        assert 10 < len(steps) < 1000 and steps == sorted(set(steps))
        assert len(caplog.records) == 2
    finally:
        subprocess.run(["umount", str(folder)], check=True, timeout=30)


class FakeRun:
    def __init__(self, fails: bool = False) -> None:
        self.fails, self.logged, self.finished = fails, [], 0

    def log(self, values, step):
        if self.fails:
            raise RuntimeError("connection lost")
        self.logged.append((step, values))

    def finish(self):
        self.finished += 1
        if self.fails:
            raise RuntimeError("connection lost")


@pytest.fixture
def fake_wandb(monkeypatch):
    """A stand-in for the library that keeps what it is asked."""
    fake = types.SimpleNamespace(run=FakeRun(), asked={}, Settings=dict)
    fake.init = lambda **asked: fake.asked.update(asked) or fake.run
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for name in ("MODE", "PROJECT", "CACHE_DIR", "CONFIG_DIR", "DATA_DIR"):
        monkeypatch.setenv(f"WANDB_{name}", "")
        monkeypatch.delenv(f"WANDB_{name}")
    return fake


def test_wandb_is_offline_and_inside_the_run(tmp_path, fake_wandb):
    writer = WandbWriter(tmp_path, "mine", {"seed": 1})
    writer.write(record(3, **{"train/loss": math.nan}))
    writer.flush()
    writer.close()
    writer.close()
    writer.write(record(4))
    assert fake_wandb.asked["mode"] == "offline" and fake_wandb.asked["dir"] == str(tmp_path)
    assert fake_wandb.run.logged == [(3, record(3, **{"train/loss": None}))] and fake_wandb.run.finished == 1
    assert os.environ["WANDB_CACHE_DIR"].startswith(str(tmp_path))


def test_wandb_mode_is_the_users_choice(tmp_path, fake_wandb, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    WandbWriter(tmp_path, "mine", {})
    assert fake_wandb.asked["mode"] == "online" and "WANDB_CONFIG_DIR" not in os.environ


def test_wandb_that_fails_is_a_warning(tmp_path, fake_wandb, caplog):
    fake_wandb.run.fails = True
    writer = WandbWriter(tmp_path, "mine", {})
    for step in range(5):
        writer.write(record(step))
    writer.close()
    assert len(caplog.records) == 1 and "connection lost" in caplog.text

    def broken(**asked):
        raise OSError("cannot start")

    fake_wandb.init = broken
    writer = WandbWriter(tmp_path, "mine", {})
    writer.write(record(1))
    writer.close()
    assert "cannot start" in caplog.text


def test_a_missing_wandb_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"pip install 'qfleet\[wandb\]'"):
        WandbWriter(tmp_path, "mine", {})
