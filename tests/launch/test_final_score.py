"""The score of the best policy: which runs are scored, what it is recorded as, and what cannot harm the training."""

import logging
import signal
from dataclasses import replace

import pytest

from qfleet.core.final_score import FinalScore, standard_error
from qfleet.launch import final_score
from qfleet.launch.final_score import EpisodeProgress, score_result
from qfleet.launch.train_result import TrainResult
from qfleet.runconfig.resolution import resolve
from qfleet.runs.directory import RunDirectory
from qfleet.training.evaluation import EvaluationAborted

SCORE = FinalScore(180.5, 4.0, 20, 1001, "best-000000000100")


class StoredPolicy:
    """Stands in for the checkpoints of a run, which has a best policy unless it is None."""

    best = object()

    def __init__(self, root, keep): ...

    def newest(self, name, *, set_aside):
        assert name == "best" and not set_aside
        return self.best


@pytest.fixture
def played(monkeypatch):
    """Calls of `play`, which returns SCORE."""
    calls = []

    def play(best, config, stop, on_episode):
        calls.append(config.eval.final_episodes)
        return SCORE

    monkeypatch.setattr(final_score, "play", play)
    monkeypatch.setattr(final_score, "Checkpoints", StoredPolicy)
    return calls


@pytest.fixture
def result(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.conclude("total_steps")
    return TrainResult(tmp_path, 100, 50, 5, 1.0, 234.0, "total_steps", 0, 100)


def config(*overrides):
    return resolve("cartpole", list(overrides)).config


@pytest.mark.parametrize("reason", ["total_steps", "total_updates", "stop_at", "stopped"])
def test_the_best_policy_of_a_finished_run_is_scored_and_the_score_recorded(result, played, reason):
    scored = score_result(replace(result, reason=reason), config("eval.final_episodes=7"), [])
    assert played == [7] and scored == replace(result, reason=reason, score=SCORE)
    assert RunDirectory(result.directory).final_score() == SCORE
    assert RunDirectory(result.directory).ending()["reason"] == reason


@pytest.mark.parametrize("change", [
    {"reason": "interrupted", "exit_code": 130}, {"reason": "preempted", "exit_code": 75},
    {"exit_code": 1}, {"already_finished": True}])
def test_a_run_that_was_interrupted_or_finished_before_is_not_scored(result, played, change):
    result = replace(result, **change)
    assert score_result(result, config(), []) == result and played == []


def test_no_policy_or_no_episodes_means_no_score(result, played, monkeypatch):
    assert score_result(result, config("eval.final_episodes=0"), []).score is None
    monkeypatch.setattr(StoredPolicy, "best", None)
    assert score_result(result, config(), []).score is None and played == []


@pytest.mark.parametrize(("error", "text"), [
    (EvaluationAborted(), "was skipped"), (KeyboardInterrupt(), "was skipped"),
    (ValueError("no display"), "no display")])
def test_an_error_or_a_signal_costs_the_score_and_not_the_run(result, played, monkeypatch, caplog, error, text):
    def play(*arguments):
        raise error

    monkeypatch.setattr(final_score, "play", play)
    with caplog.at_level(logging.WARNING):
        assert score_result(result, config(), []) == result
    assert text in caplog.text and RunDirectory(result.directory).ending()["reason"] == "total_steps"
    assert RunDirectory(result.directory).final_score() is None


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 75)])
def test_a_signal_other_than_ctrl_c_during_the_score_sets_the_exit_code(result, played, monkeypatch, number, code):
    def play(best, config, stop, on_episode):
        signal.raise_signal(number)
        assert stop()
        raise EvaluationAborted

    monkeypatch.setattr(final_score, "play", play)
    assert score_result(result, config(), []) == replace(result, exit_code=code)


def test_long_scoring_is_shown_every_ten_seconds():
    rows, now = [], [0.0]

    class View:
        def plan(self, shown):
            rows.extend(shown)

    progress = EpisodeProgress(config("eval.final_episodes=20"), [View()], lambda: now[0])
    for second in range(1, 21):
        now[0] = second
        progress(second)
    assert [text.split(" fresh")[0] for _, text in rows] == ["3 of 20", "13 of 20"]
    assert "Ctrl-C skips the rest" in rows[0][1]


def test_a_result_is_the_same_after_json(result):
    for each in (result, replace(result, score=SCORE)):
        assert TrainResult.from_json(each.to_json()) == each


def test_a_new_attempt_has_no_score_yet(result, played):
    score_result(result, config(), [])
    directory = RunDirectory(result.directory)
    directory.add_attempt({})
    assert directory.final_score() is None


@pytest.mark.parametrize("stored", [None, 3, {}, {"mean": "5"}, {"mean": float("nan")}, {"mean": 1, "episodes": 20},
                                    {"mean": 1.0, "standard_error": [], "episodes": 2, "seed": 1, "checkpoint": "b"}])
def test_a_malformed_score_is_none(stored):
    assert FinalScore.from_json(stored) is None


def test_the_standard_error_is_that_of_the_sample():
    assert standard_error(2.0, 5) == 1.0 and standard_error(2.0, 1) is None
