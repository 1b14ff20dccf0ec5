"""Tests for a GPU are deselected where there is none, so that nothing is skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_tests_for_a_gpu_are_deselected_without_one():
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": "", "QFLEET_NO_SKIPS": "1"}
    files = ["tests/accel/test_gpu_replay.py", "tests/accel/test_gpu_memory.py"]
    found = subprocess.run([sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *files], cwd=ROOT, env=hidden,
                           capture_output=True, text=True, timeout=100)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "skipped" not in found.stdout


def test_every_test_of_a_file_for_a_gpu_is_marked():
    files = [path for path in Path(__file__).parent.glob("test_gpu_*.py") if path.stem not in ("test_gpu_memory",
                                                                                              "test_gpu_selection")]
    assert len(files) >= 4
    assert all("pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]" in path.read_text() for path in files)
