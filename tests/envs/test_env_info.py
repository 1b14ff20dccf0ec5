"""Metrics from `info`: what each kind is of an episode, what is refused, and that it is the same in all lanes."""

import logging
import statistics

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from qfleet.core.errors import UserError
from qfleet.envs import EnvConfig, make
from qfleet.envs import info as info_module
from qfleet.envs.info import EpisodeInfo, InfoMetric, parse_metrics
from qfleet.envs.prototype import env_reference

NAIVE = {"sum": sum, "mean": statistics.fmean, "max": max, "min": min, None: lambda values: values[-1]}


class Told(gymnasium.Env):
    """Its info is a list of dicts, one per step; the episode ends with the list."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, infos):
        self.infos = infos

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros(1, np.float32), {"cost": 1e6}  # not of a step

    def step(self, action):
        info, self.t = self.infos[self.t], self.t + 1
        if isinstance(info, Exception):
            raise info
        return np.zeros(1, np.float32), 0.0, self.t == len(self.infos), False, info


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    monkeypatch.setattr(info_module, "_warned", set())


def episodes(infos, metrics, count=1, lanes=1):
    """Info metrics of the episodes of every lane, in order."""
    env = make(EnvConfig(id=env_reference(Told(infos)), info_metrics=metrics), lanes)
    env.reset([0] * lanes)
    found = []
    while len(found) < count * lanes:
        env.send(np.zeros(lanes, int))
        step = env.recv()
        assert set(step.info) == set(step.final_info) == set(step.last.nonzero()[0].tolist())
        found += [dict(step.info[lane]) for lane in sorted(step.info)]
    return found


@pytest.mark.parametrize(("text", "key", "reducer", "tag"), [
    ("success", "success", None, "success"), (" sum(cost) ", "cost", "sum", "cost_sum"),
    ("mean(a.b)", "a.b", "mean", "a.b_mean"), ("max( speed )", "speed", "max", "speed_max"),
    ("min(x)", "x", "min", "x_min"), ("my key:é", "my key:é", None, "my_key__"), ("sum", "sum", None, "sum"),
])
def test_how_a_metric_is_written(text, key, reducer, tag):
    metric = InfoMetric.parse(text)
    assert (metric.key, metric.reducer, metric.tag) == (key, reducer, tag)


@pytest.mark.parametrize("text", ["", " ", "median(x)", "sum(x", "x)", "sum()", "sum( )", "(x)", "sum(max(x))"])
def test_anything_else_is_refused(text):
    with pytest.raises(ValueError, match=r"write a key of info, or sum\(key\), mean\(key\), max\(key\), min\(key\)"):
        InfoMetric.parse(text)
    with pytest.raises(ValidationError):
        EnvConfig(id="CartPole-v1", info_metrics=[text])


def test_names_are_short_and_differ():
    with pytest.raises(ValueError, match="longer than 80 characters"):
        InfoMetric.parse("sum(" + 77 * "x" + ")")
    for texts in (["cost_sum", "sum(cost)"], ["a b", "a_b"], ["x", "x"]):
        with pytest.raises(ValueError, match="two metrics have the name"):
            parse_metrics(texts)


@given(st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6), st.booleans(), st.integers(-9, 9)), min_size=1, max_size=20),
       st.sampled_from(list(NAIVE)))
def test_an_episode_has_what_a_naive_loop_finds(values, reducer):
    episode = EpisodeInfo([InfoMetric("x", reducer)])
    for _ in range(2):  # the second episode starts anew
        infos = [{} if value is None else {"x": value} for value in values]
        for each in infos:
            episode.add(each)
        found = episode.finish("a naive loop", infos[-1])
        present = [float(value) for value in values if value is not None]
        assert list(found.values()) == ([pytest.approx(NAIVE[reducer](present))] if present else [])


def test_numbers_of_all_kinds_count():
    infos = [{"a": np.float32(1.5), "b": True, "c": np.array(2), "d": {"e": {"f": np.int64(3)}}}]
    assert episodes(infos, ["a", "b", "c", "d.e.f"]) == [{"a": 1.5, "b": 1.0, "c": 2.0, "d.e.f": 3.0}]


def test_only_the_steps_of_the_episode_count_in_every_lane():
    infos = [{"cost": 1}, {"cost": 4, "success": False}, {"cost": 1, "success": True}]
    metrics = ["success", "sum(cost)", "mean(cost)", "max(cost)", "min(cost)"]
    expected = {"success": 1.0, "cost_sum": 6.0, "cost_mean": 2.0, "cost_max": 4.0, "cost_min": 1.0}
    assert episodes(infos, metrics, count=3, lanes=2) == [expected] * 6


def test_the_last_value_counts_even_if_a_later_step_lacks_it():
    assert episodes([{"found": 2}, {"found": 3}, {}], ["found"]) == [{"found": 3.0}]


@pytest.mark.parametrize(("value", "shown"), [("yes", "'yes'"), ("0.5", "'0.5'"), (None, "None"), ([1, 2], "[1, 2]"),
                                              (float("nan"), "nan"), (np.inf, "inf"), (1e300, "1e+300"),
                                              (np.zeros(2), "array([0., 0.])")])
def test_what_is_no_number_is_an_error_with_the_value(value, shown):
    with pytest.raises(UserError) as error:
        episodes([{"success": value}], ["success"])
    assert f"env.info_metrics: info['success'] is {shown}, which is not a finite number" in str(error.value)


@pytest.mark.parametrize(("metric", "info", "words"), [
    ("sucess", {"success": 1, "cost": 2}, "did you mean success?"),
    ("speed", {"success": 1, "cost": 2}, "info has success, cost"), ("x", {}, "info has no keys"),
    ("stats.coins", {"stats": {"coin": 1}}, "did you mean stats.coin?"),
    ("stats.coin.gold", {"stats": {"coin": 1}}, "info has stats.coin|did you mean stats.coin"),
])
def test_a_missing_key_warns_once_with_what_there_is(metric, info, words, caplog):
    caplog.set_level(logging.WARNING)
    assert episodes([info], [metric], count=3, lanes=2) == [{}] * 6
    found = [record.getMessage() for record in caplog.records if "info_metrics" in record.getMessage()]
    assert len(found) == 1 and any(each in found[0] for each in words.split("|")), found
    assert f"Told had {metric!r} in info, and such episodes do not count in its mean" in found[0]


def test_an_episode_that_is_broken_off_leaves_nothing_behind():
    env = make(EnvConfig(id=env_reference(Flaky()), info_metrics=["sum(cost)"]), 1)
    env.reset([0])
    rows = []
    for _ in range(6):
        env.send(np.zeros(1, int))
        rows.append(env.recv())
    assert [bool(row.aborted[0]) for row in rows] == [False, True, False, False, False, False]
    assert [dict(row.info) for row in rows] == [{}, {}, {}, {}, {0: {"cost_sum": 3.0}}, {}]


class Flaky(Told):
    """Raises in the second step of the first instance that gets so far."""

    raised = False

    def __init__(self):
        super().__init__([{"cost": 1}] * 3)

    def step(self, action):
        if self.t == 1 and not Flaky.raised:
            Flaky.raised = True
            raise RuntimeError("once")
        return super().step(action)


def test_without_metrics_info_may_be_anything():
    env = make(EnvConfig(id=env_reference(Told([{"x": "text"}, {1: object()}]))), 1)
    env.reset([0])
    for _ in range(5):
        env.send(np.zeros(1, int))
        assert not env.recv().info


def test_atari_says_where_there_is_no_info():
    reasons = EnvConfig(id="PongNoFrameskip-v4").inactive()
    assert reasons["info_metrics"] == "without env.wrappers, since the games return no info"
