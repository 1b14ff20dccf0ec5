"""Which numbers a run computes with: measured where it begins, and then written down."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from qfleet import api
from qfleet.accel import precision
from qfleet.runconfig import resolution
from qfleet.runconfig.auto import resolve_auto
from qfleet.runconfig.build import make_env

PIXELS = ["env.kwargs={pixels: true, rows: 6, columns: 5, side: 8}", "total_steps=300", "replay.min_steps=64",
          "replay.samples_per_insert=2", "eval.episodes=1"]


@pytest.mark.parametrize(("gain", "images", "taken"), [
    (2.0, True, "bf16"), (1.1, True, "fp32"), (0.5, True, "fp32"), (2.0, False, "fp32")])
def test_auto_takes_what_is_clearly_faster_and_never_rounds_vectors(
        monkeypatch: pytest.MonkeyPatch, gain: float, images: bool, taken: str) -> None:
    monkeypatch.setattr(precision, "bf16_gain", lambda: gain)
    config = resolution.resolve("catch", ["device=cpu", *(PIXELS if images else [])]).config
    env = make_env(config.env, config.env.lanes)
    try:
        assert resolve_auto(config, env.spec).learner.precision == taken
    finally:
        env.close()


def test_what_was_measured_once_is_kept_when_a_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "bf16_gain", lambda: 2.0)
    api.train("catch", [*PIXELS, "device=cpu", f"run.root={tmp_path}", "run.name=x"])
    run = tmp_path / "x"
    assert yaml.safe_load((run / "config.yaml").read_text())["learner"]["precision"] == "bf16"
    monkeypatch.setattr(precision, "bf16_gain", lambda: 0.5)
    api.resume(run, ["total_steps=400"])
    assert yaml.safe_load((run / "config.yaml").read_text())["learner"]["precision"] == "bf16"


def test_measuring_leaves_the_threads_as_they_were() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert precision.bf16_gain.__wrapped__() > 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="says which instructions of x86 may be used")
@pytest.mark.slow
def test_a_processor_without_such_instructions_is_found_out() -> None:
    """oneDNN is told to use none but AVX2's: it then computes bfloat16 by detours."""
    code = "from qfleet.accel.precision import bf16_gain; import json; print(json.dumps(bf16_gain()))"
    answer = subprocess.run([sys.executable, "-c", code], env=os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}, check=True,
                            capture_output=True, text=True, timeout=120)
    assert json.loads(answer.stdout) < precision.MIN_GAIN


@pytest.mark.gpu
def test_a_gpu_with_bf16_units_computes_images_in_bf16():
    assert precision.bf16_is_fast_on(torch.device("cuda")) == (torch.cuda.get_device_capability() >= (8, 0))
