"""Every member of the value family learns a small Catch, 3 of 3 seeds each: whole runs, to a threshold."""

import pytest

from qfleet import api

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

COMMON = ["env.kwargs={rows: 5, columns: 5}", "total_steps=15000", "eval.period_steps=500", "run.threads=1",
          "run.tensorboard=false", "checkpoint.period_steps=null", "checkpoint.replay=false", "replay.min_steps=500",
          "replay.samples_per_insert=16", "learner.batch_size=32", "learner.target_period_updates=50"]
NOISY = ["agent.noisy=true", "explore.kind=constant", "explore.epsilon=0"]
EPSILON = ["explore.steps=2000"]
C51 = ["agent.algo=c51", "agent.v_min=-1.5", "agent.v_max=1.5"]
MEMBERS = {
    "c51": [*C51, *EPSILON],
    "hlgauss": ["agent.algo=hlgauss", "agent.v_min=-1.5", "agent.v_max=1.5", *EPSILON],
    "qr": ["agent.algo=qr", "agent.quantiles=16", *EPSILON],
    "iqn": ["agent.algo=iqn", "agent.policy_samples=8", *EPSILON],
    "dueling": ["agent.dueling=true", *EPSILON],
    "prioritised": ["replay.alpha=0.6", *EPSILON],
    "noisy": NOISY,
    "munchausen": ["agent.munchausen=true", *EPSILON],
    "rainbow": [*C51, "agent.dueling=true", "agent.n_step=3", "replay.alpha=0.5", *NOISY],
    "btr": ["agent.algo=iqn", "agent.samples=4", "agent.target_samples=4", "agent.policy_samples=4",
            "agent.munchausen=true", "agent.dueling=true", "agent.n_step=3",
            "replay.alpha=0.2", "agent.noisy=true", "agent.noisy_epsilon=true", *EPSILON],
}
MEMBERS["btr pixels"] = [
    *MEMBERS["btr"], "env.kwargs={rows: 3, columns: 3, pixels: true, side: 12}", "agent.torso=impala",
    "agent.spectral_norm=true", "agent.torso_pool=2", "total_steps=3000", "explore.steps=1000",
    "replay.min_steps=200", "learner.learning_rate=5e-4", "eval.period_steps=750"]
"""From a small picture of a small board: an update of the residual torso costs as much as many of the others."""


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("member", MEMBERS)
def test_catch_is_solved(tmp_path, member, seed):
    words = [*COMMON, *MEMBERS[member], "agent.hidden=[64]", f"seed={seed}", f"run.root={tmp_path}"]
    result = api.train("catch", words)
    assert result.reason == "stop_at", f"best {result.best} after {result.steps} steps"
    assert api.evaluate(result.directory, episodes=20, seed=4321).mean_reward >= 0.9
