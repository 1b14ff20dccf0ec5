"""Metrics from `info` reach the records of every topology, and vector environments learn what plain lanes learn."""

from pathlib import Path

import gymnasium
import pytest
from real_runs import TINY, records, train, weights_hash

import qfleet
from qfleet.core.errors import UserError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

METRICS = "env.info_metrics=[success,sum(cost),mean(cost),nested.episode]"
SHORT = ["total_steps=600", "eval.period_steps=300", "checkpoint.period_steps=null", "run.log_period_steps=100"]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("topology", [[], ["env.isolate=true"], ["actors=2"], ["learners=2", "sync=allreduce"],
                                      ["learners=2", "sync=server", "actors=2", "parameter_server.shards=1"]],
                         ids=lambda words: " ".join(words) or "one process")
def test_they_are_averaged_and_logged_wherever_the_roles_live(topology):
    result = train("info_envs:Told", *SHORT, METRICS, *topology)
    found = records(result.directory)
    trained = [record for record in found if "rollout/info/success" in record]
    assert trained, found
    for record in trained:
        assert (record["rollout/info/cost_sum"], record["rollout/info/cost_mean"]) == (2.0, 0.5)
        assert 0 <= record["rollout/info/success"] <= 1
    assert any(0.2 < record["rollout/info/success"] < 0.8 for record in trained)  # a mean over the lanes
    numbers = [record["rollout/info/nested.episode"] for record in trained]  # of actors that start at different times
    assert max(numbers) > min(numbers) >= 0 and ("actors=2" in topology or numbers[-1] > numbers[0])
    evaluated = [record for record in found if "eval/mean_reward" in record]
    assert evaluated and all(record["eval/info/cost_sum"] == 2.0 and "eval/info/success" in record
                             for record in evaluated)
    assert not any(record.get("fault/bad_messages") for record in found)


def test_an_evaluation_has_them_too_and_without_them_nothing_changes():
    plain = train("info_envs:Told", *SHORT)
    told = train("info_envs:Told", *SHORT, METRICS)
    assert weights_hash(plain.directory) == weights_hash(told.directory)
    assert not any("info/" in tag for record in records(plain.directory) for tag in record)
    result = qfleet.evaluate(told.directory, episodes=4, lanes=2)
    assert result.info == {"success": 0.5, "cost_sum": 2.0, "cost_mean": 0.5, "nested.episode": 0.5}
    assert result.to_json()["info"] == result.info and qfleet.evaluate(plain.directory, episodes=2).info == {}


def test_a_value_that_is_no_number_ends_a_run_with_the_value():
    Path("odd.py").write_text(ODD)
    with pytest.raises(UserError, match=r"info\['success'\] is 'yes', which is not a finite number"):
        train("odd:Odd", *SHORT, "env.info_metrics=[success]", "env.isolate=true")


ODD = """
from info_envs import Told
class Odd(Told):
    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, reward, terminated, truncated, {"success": "yes"}
"""


def mine():
    return gymnasium.make("CartPole-v1")


def test_however_an_environment_is_given_the_same_is_learnt():
    """By id, as a class, an instance, a function, and as vector environments in this and other processes."""
    short = [*TINY, "total_steps=300", "eval.period_steps=150", "checkpoint.period_steps=null"]
    expected = weights_hash(qfleet.train("vector", [*short, "env.id=CartPole-v1"]).directory)
    for env in (mine, lambda: gymnasium.make("CartPole-v1"), gymnasium.make("CartPole-v1"), "CartPole-v1",
                lambda num_envs: gymnasium.make_vec("CartPole-v1", num_envs, "sync"),
                lambda num_envs: gymnasium.make_vec("CartPole-v1", num_envs, "async"),
                gymnasium.make_vec("CartPole-v1", 5, "sync")):
        result = qfleet.train("vector", short, env=env)
        assert weights_hash(result.directory) == expected, env
