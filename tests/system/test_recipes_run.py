"""Every recipe that comes with the package runs: a few hundred steps of it, with its own agent and environment."""

import pytest
from real_runs import newest

from qfleet import api
from qfleet.runconfig.resolution import recipe_for, recipe_names, resolve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

GENERAL = {"vector": "CartPole-v1", "pixels": "toy/Catch-v0", "atari": "ALE/Breakout-v5", "control": "Pendulum-v1",
           "control-pixels": "test_control_runs:Painter", "small-images": "MiniGrid-Empty-5x5-v0",
           "recurrent": "toy/TMaze-v0", "discrete": "FrozenLake-v1"}
"""Recipes without an environment of their own, and one for each."""

SHORTER = {"btr": ["env.lanes=4", "env.frame_size=42", "learner.batch_size=8", "agent.torso_width=1",
                   "replay.samples_per_insert=0.5"],
           "data-efficient-rainbow": ["replay.chunk_steps=32"],
           "pong-fast": ["env.lanes=4", "learner.batch_size=16"],
           "control-pixels": ["env.stack=1", "learner.batch_size=8"]}
"""What needs more to be short."""

SHORT = ["replay.samples_per_insert=1", "agent.burn_in=4", "agent.unroll=8", "agent.stride=8", "agent.n_step=2",
         "agent.features=[32]", "agent.units=32", "agent.hidden=[32]", "learner.batch_size=16"]
"""For agents that are trained on sequences."""


def small(name):
    """Overrides that shorten a recipe and leave what it is."""
    words = ["total_steps=300", "replay.min_steps=128", "replay.capacity=4000", "replay.samples_per_insert=2",
             "replay.chunk_steps=8", "eval.episodes=1", "env.max_episode_steps=40", "run.threads=1", "run.name=x"]
    agent = resolve(name, [f"env.id={GENERAL[name]}"] if name in GENERAL else []).config.agent
    if getattr(agent, "continuous", False):
        words += ["learner.batch_size=32"]
    if getattr(agent, "unroll", None):
        words += ["env.lanes=8", "learner.batch_size=16"] if name == "deep-sea" else SHORT
    if name in GENERAL:
        words.append(f"env.id={GENERAL[name]}")
    words += SHORTER.get(name, [])
    return [*words, "env.kwargs={pixels: true, side: 36}"] if name == "pixels" else words


@pytest.mark.parametrize("name", recipe_names())
def test_the_recipe_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = api.train(name, small(name))
    assert result.exit_code == 0 and result.steps >= 300 and result.updates >= 3 and result.best is not None
    assert newest(result.directory).manifest.updates == result.updates
    assert api.evaluate(result.directory, episodes=1).episodes == 1


@pytest.mark.parametrize("env_id", ["CartPole-v1", "ALE/Pong-v5", "PongNoFrameskip-v4", "toy/Catch-v0"])
def test_an_environment_finds_its_recipe_by_name(env_id):
    assert resolve(env_id).config.env.id == env_id and recipe_for(env_id) in recipe_names()
