"""An agent acts where its environment's package is not installed; files of earlier versions need the environment."""

from __future__ import annotations

import json
import subprocess
import sys

import gymnasium
import numpy as np
import pytest
import torch
from checkpoint_kit import rewrite_manifest
from policies import cartpole, checkpoint_of

from qfleet import api
from qfleet.core.errors import UserError
from qfleet.runs.checkpoint import CheckpointMeta, Checkpoints

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
MODULE = """
import gymnasium
from gymnasium import spaces
import numpy as np

class Hidden(gymnasium.Env):
    observation_space = spaces.Dict({"cell": spaces.Discrete(3, start=5), "speed": spaces.Box(-1, 1, (2,))})
    action_space = spaces.MultiDiscrete([2, 3], start=[0, 7])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 1.0, bool(self.np_random.random() < 0.2), False, {}
"""
TINY = ["agent.hidden=[16]", "env.lanes=2", "replay.chunk_steps=8", "replay.min_steps=32", "learner.batch_size=8",
        "replay.samples_per_insert=1", "eval.episodes=2", "run.tensorboard=false", "stop_at=null", "total_steps=60",
        "env.max_episode_steps=20", "run.threads=1", "checkpoint.replay=false"]
ELSEWHERE = """
import json, sys
import numpy as np
import qfleet
agent = qfleet.load("policy", trust=True)
obs = [{"cell": 5 + i % 3, "speed": np.array([i / 9, -i / 9], np.float32)} for i in range(9)]
print(json.dumps([agent.act(each).tolist() for each in obs]))
assert "hidden_env" not in sys.modules
"""


def test_a_trained_agent_acts_without_the_package_of_its_environment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "hidden_env.py").write_text(MODULE)
    result = api.train("hidden_env:Hidden", TINY)
    api.export(result.directory, tmp_path / "away" / "policy", "latest")
    agent = api.load(result.directory, which="latest")
    obs = [{"cell": 5 + i % 3, "speed": np.array([i / 9, -i / 9], np.float32)} for i in range(9)]
    expected = [agent.act(each).tolist() for each in obs]
    del sys.modules["hidden_env"]
    done = subprocess.run([sys.executable, "-c", ELSEWHERE], cwd=tmp_path / "away", capture_output=True, text=True,
                          timeout=100)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == expected
    (tmp_path / "hidden_env.py").unlink()
    with pytest.raises(UserError, match="there is no module 'hidden_env'"):
        api.evaluate(tmp_path / "away" / "policy", trust=True)


def test_a_checkpoint_without_spaces_needs_the_environment(tmp_path, monkeypatch):
    path = checkpoint_of(api.load(checkpoint_of(cartpole(), tmp_path / "first")), tmp_path / "again")
    rewrite_manifest(path, lambda body: body["env"].pop("spaces"))
    agent, built = api.load(path), []
    build = gymnasium.make
    monkeypatch.setattr("gymnasium.make", lambda *args, **kwargs: built.append(1) or build(*args, **kwargs))
    assert agent.spec.spaces is None and agent.act(np.zeros(4, np.float32)) in (0, 1) and built == [1]
    agent = api.load(checkpoint_of(cartpole(), tmp_path / "first"))
    assert agent.spec.spaces and agent.act(np.zeros(4, np.float32)) in (0, 1) and built == [1]


@pytest.mark.parametrize(("change", "message"), [
    ({"observation": {"type": "Pickle"}}, "spaces stored in checkpoint .* cannot be read"),
    ({"action": {"type": "Discrete", "n": 3, "start": 0}}, "2 actions.*3 actions")])
def test_spaces_that_do_not_fit_are_refused(tmp_path, change, message):
    path = checkpoint_of(cartpole(), tmp_path / "first")
    rewrite_manifest(path, lambda body: body["env"]["spaces"].update(change))
    with pytest.raises(UserError, match=message):
        api.load(path).act(np.zeros(4, np.float32))


def test_a_run_that_cannot_store_its_spaces_is_saved_all_the_same(tmp_path):
    agent = api.load(checkpoint_of(cartpole(), tmp_path / "first"))
    spec = type(agent.spec).from_json({**agent.spec.to_json(), "spaces": None})
    assert spec == agent.spec and spec.spaces is None
    meta = CheckpointMeta("seed: 1", spec)
    saved = Checkpoints(tmp_path / "third", 1).save_policy(1, 1, {"w": torch.ones(1)}, meta)
    assert "spaces" not in json.loads((saved / "manifest.json").read_text())["env"]
