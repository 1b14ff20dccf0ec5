"""Scores: human-normalised, interquartile means, intervals; and runs as the columns of a page."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qfleet.report.scores import HUMAN, human_normalised, iqm, iqm_interval
from qfleet.report.series import columns, evaluations

FINITE = st.floats(-1e6, 1e6)


@pytest.mark.parametrize(("env_id", "score", "expected"), [
    ("ALE/Pong-v5", -20.7, 0.0), ("PongNoFrameskip-v4", 14.6, 1.0), ("ALE/Breakout-v5", 1.7 + 2 * 28.8, 2.0),
    ("Pong-v4", 14.6, 1.0), ("CartPole-v1", 500.0, None), ("my_env:Pong", 1.0, None), ("", 0.0, None)])
def test_a_human_is_one_and_a_random_player_nothing(env_id, score, expected):
    found = human_normalised(env_id, score)
    assert found is None if expected is None else found == pytest.approx(expected)


def test_the_table_names_the_57_games_as_the_emulator_does():
    from qfleet.envs.atari import games

    assert len(HUMAN) == 57 and set(HUMAN) <= set(games())
    assert all(human > random for random, human in HUMAN.values())


@given(st.lists(FINITE, min_size=1, max_size=40))
def test_iqm_is_the_mean_of_the_middle_half(scores):
    ordered = sorted(scores)
    cut = len(scores) // 4
    middle = ordered[cut:len(scores) - cut]
    assert iqm(np.array(scores)) == pytest.approx(sum(middle) / len(middle), rel=1e-9, abs=1e-6)


def test_iqm_ignores_outliers():
    assert iqm(np.array([1.0, 2.0, 3.0, 1000.0])) == 2.5
    assert iqm(np.arange(8.0).reshape(2, 4)).tolist() == [1.5, 5.5]


def test_the_interval_holds_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(200):
        _, low, high = iqm_interval([rng.normal(0, 1, 20), rng.normal(0, 1, 20)], rng, 300)
        hits += low <= 0 <= high
    assert 175 <= hits <= 199


def test_resampling_stays_within_an_environment():
    middle, low, high = iqm_interval([[0.0] * 4, [1.0] * 4], np.random.default_rng(0))
    assert (middle, low, high) == (0.5, 0.5, 0.5), "every resample has four scores of each environment"
    _, low, high = iqm_interval([[0.0] * 4 + [1.0] * 4], np.random.default_rng(0))
    assert low < 0.2 and high > 0.8


def test_one_seed_is_its_own_interval():
    assert iqm_interval([[3.0]], np.random.default_rng(0)) == (3.0, 3.0, 3.0)


def record(step, **tags):
    return {"step": step, "frames": 4 * step, "updates": step // 2, "time_s": step / 10, **tags}


def test_a_short_run_keeps_every_point():
    found = columns([record(10, **{"train/loss": 0.5}), record(20, **{"train/loss": None, "time/fps": 2.5})])
    assert found["x"] == {"steps": [10, 20], "frames": [40, 80], "updates": [5, 10], "episodes": [None, None],
                          "time": [1, 2]}
    assert found["y"] == {"train/loss": [0.5, None], "time/fps": [None, 2.5]} and found["each"] == 1


def test_an_evaluation_adds_to_its_step_and_overwrites_nothing_else():
    found = columns([record(10, **{"time/fps": 100.0}), record(10, **{"time/fps": 0.0, "eval/mean_reward": 7.0})])
    assert found["x"]["steps"] == [10] and found["y"] == {"eval/mean_reward": [7], "time/fps": [100]}


def test_a_long_run_is_thinned_to_means():
    found = columns([record(step, **{"train/loss": float(step)}) for step in range(1, 1001)], most=100)
    assert found["each"] == 10 and len(found["x"]["steps"]) == 100
    assert found["x"]["steps"][0] == 10 and found["y"]["train/loss"][0] == 5.5


def test_the_limit_is_told_for_every_point():
    busy = {"actor/env_ms": 9.0, "actor/act_ms": 1.0, "actor/store_ms": 0.0, "actor/wait_ms": 0.0,
            "train/sample_ms": 0.1, "train/update_ms": 0.2, "time/actor_share": 0.9, "time/learner_share": 0.1}
    idle = {"actor/env_ms": 1.0, "train/update_ms": 20.0, "time/actor_share": 0.1, "time/learner_share": 0.9}
    records = [record(step, **busy) for step in range(1, 21)] + [record(step, **busy | idle) for step in range(21, 51)]
    limits = columns(records)["limits"]
    assert limits[0] == limits[19] == "env" and limits[-1] == "learner"
    assert columns([record(1)])["limits"] == [None]


def test_of_two_evaluations_at_a_step_the_later_counts():
    records = [record(5, **{"eval/mean_reward": 1.0}), record(9, **{"eval/mean_reward": 2.0}),
               record(9, **{"eval/mean_reward": 3.0}), record(12), {"eval/mean_reward": 4.0}]
    assert evaluations(records) == [(5, 1), (9, 3)]


def test_of_a_long_run_there_is_a_limit_for_every_point_all_the_same():
    busy = {"actor/env_ms": 9.0, "actor/act_ms": 1.0, "actor/store_ms": 0.0, "actor/wait_ms": 0.0,
            "train/sample_ms": 0.1, "train/update_ms": 0.2, "time/actor_share": 0.9, "time/learner_share": 0.1}
    idle = busy | {"actor/env_ms": 1.0, "train/update_ms": 20.0, "time/actor_share": 0.1, "time/learner_share": 0.9}
    limits = columns([record(step, **(busy if step <= 250 else idle)) for step in range(1, 451)])["limits"]
    assert len(limits) == 450 and limits[0] == limits[240] == "env" and limits[300] == limits[-1] == "learner"
