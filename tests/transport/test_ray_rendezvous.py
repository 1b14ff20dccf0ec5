"""Ranks under Ray meet at a store that only Ray reaches; real Ray, real gloo."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]
PROBE = Path(__file__).parent / "rendezvous_probe.py"


def test_ranks_meet_at_a_ray_actor_in_each_attempt_and_do_not_wait_for_ever(tmp_path):
    paths = os.pathsep.join([str(PROBE.parent), str(PROBE.parent.parent / "system"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, str(PROBE), str(tmp_path / "found.json")], capture_output=True, text=True,
                          timeout=180, env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["store"] == {"a": [0, 255], "b": "text", "check": [True, False]}
    assert found["attempt1"] == found["attempt2"] == [[[0.0], [1.0], [3.0, 3.0, 3.0]]] * 2
    assert "did not reach all of 2 ranks within 1 s" in found["alone"]
    assert found["open"] == [], "who has no token of Ray's finds no store"
