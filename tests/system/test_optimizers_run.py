"""Whole runs with weight decay, an optimizer by name and schedules: resumed, and with a server, bit by bit."""

import pytest
import torch
from real_runs import newest, records, train, weights_hash

from qfleet import api

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ADAMW = ["learner.optimizer=adamw", "learner.weight_decay=0.1", "learner.schedule=cosine", "learner.warmup_updates=20",
         "learner.schedule_updates=150"]
NADAM = ["learner.optimizer=torch.optim:NAdam", "learner.schedule=linear", "learner.schedule_updates=150"]
RULES = pytest.mark.parametrize("rule", [ADAMW, NADAM], ids=["adamw", "nadam"])


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@RULES
def test_resumed_in_mid_schedule_equals_never_interrupted(rule):
    exact = [*rule, "run.exact_resume=true", "checkpoint.period_steps=200", "env.max_episode_steps=50",
             "eval.period_steps=null"]
    whole = train("cartpole", *exact, "total_steps=400", "run.name=whole").directory
    part = train("cartpole", *exact, "total_steps=200", "run.name=part").directory
    api.resume(part, ["total_steps=400"])
    assert weights_hash(whole) == weights_hash(part)
    rates = [[record["train/learning_rate"] for record in records(run) if "train/learning_rate" in record]
             for run in (whole, part)]
    assert rates[0] == rates[1] and len(set(rates[0])) > 1


def test_one_learner_with_a_server_is_solo():
    """The state of an optimizer by name crosses the wire from the shard to the checkpoint."""
    schedule = [*NADAM, "total_steps=300", "eval.period_steps=null", "device=cpu"]
    solo = train("cartpole", *schedule, "run.name=solo").directory
    one = train("cartpole", *schedule, "run.name=one", "sync=server").directory
    first, second = (newest(run).state()["learner"] for run in (solo, one))
    assert weights_hash(solo) == weights_hash(one) and first["updates"] == second["updates"] > 0
    assert first["gradients"].keys() == second["gradients"].keys() >= {"optimizer.exp_avg", "optimizer.mu_product"}
    assert all(torch.equal(value, second["gradients"][name]) for name, value in first["gradients"].items())
