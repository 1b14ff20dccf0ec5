"""Environments of other packages need only their id: in fleets, isolated, evaluated, recorded and resumed."""

from __future__ import annotations

import numpy as np
import pytest
from real_runs import TINY, qfleet, train

from qfleet import api
from qfleet.report.video import prepare_frame

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
SHORT = [*TINY, "total_steps=400", "replay.capacity=1000", "env.max_episode_steps=20", "eval.period_steps=200"]


@pytest.mark.parametrize("topology", [["actors=1"], ["env.isolate=true"]], ids=["fleet", "isolated"])
def test_minigrid_is_trained_in_by_other_processes_and_read_alike_in_all(topology, tmp_path):
    made = qfleet("train", "MiniGrid-DoorKey-5x5-v0", *SHORT, *topology, "run.name=x", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert "mission" in made.stderr and "Traceback" not in made.stderr
    agent = api.load(tmp_path / "runs" / "x")
    assert agent.config.env.image_symbols == {"image": 16}
    assert agent.spec.observation["image"].symbols == 16
    observation = {"image": np.ones((7, 7, 3), np.uint8), "direction": 2, "mission": "use the key to open the door"}
    assert 0 <= agent.act(observation) < 7
    assert api.evaluate(tmp_path / "runs" / "x", episodes=2).episodes == 2


def test_minatar_is_recorded_and_resumed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = train("MinAtar/Breakout-v1", *SHORT, "run.name=x")
    assert result.exit_code == 0 and result.best is not None
    frames = [prepare_frame(step.frame) for step in api.rollout(result.directory, episodes=1)]
    assert frames and frames[0].shape == (320, 320, 3)
    assert api.resume(result.directory, ["total_steps=600"]).steps >= 600
