"""Learning to a threshold, with the recipes as they are: k of k seeds, and bfloat16 learns what float32 does."""

import pytest

from qfleet import api

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PIXELS = ["env.kwargs={pixels: true, rows: 6, columns: 5, side: 8}", "agent.torso=small", "learner.batch_size=32",
          "replay.samples_per_insert=8", "explore.steps=3000", "eval.period_steps=1000", "total_steps=10000"]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def solved(source, *overrides):
    """Train until solved; the steps it took, and that a fresh evaluation agrees."""
    result = api.train(source, ["run.threads=1", "run.tensorboard=false", *overrides])
    assert result.reason == "stop_at", f"{source} {overrides}: best {result.best} after {result.steps} steps"
    again = api.evaluate(result.directory, episodes=20, seed=4321)
    return result.steps, again.mean_reward


@pytest.mark.parametrize("seed", [1, 2])
def test_cartpole_is_solved_within_its_budget(seed):
    steps, again = solved("cartpole", f"seed={seed}", "total_steps=50000", "stop_at=475")
    assert steps < 50_000 and again >= 450


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_catch_is_solved(seed):
    steps, again = solved("catch", f"seed={seed}")
    assert steps <= 10_000 and again == 1.0


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_catch_is_solved_from_pixels_in_either_precision(precision, seed):
    steps, again = solved("catch", *PIXELS, f"learner.precision={precision}", f"seed={seed}")
    assert steps <= 6_000 and again >= 0.9


def test_a_learner_that_does_not_learn_would_be_seen():
    result = api.train("catch", ["learner.learning_rate=1e-9", "total_steps=5000", "run.threads=1"])
    assert result.reason == "total_steps" and result.best < 0.95
