"""Progress of a study: plain lines, a live line on a terminal, and silence."""

import io
from types import SimpleNamespace

import pytest

from qfleet.tuning.view import StudyView


class Terminal(io.StringIO):
    def isatty(self):
        return True


def trial(number, scores=(), reported=0):
    return SimpleNamespace(number=number, settings={"agent.n_step": 3, "learner.learning_rate": 0.000123456},
                           reported=reported, scores=list(scores), steps=20_000, seconds=75.0)


def events(view):
    view.started(trial(0))
    view.evaluated(trial(0, reported=1), 12.0)
    view.ended(trial(0, [40.0, 60.0]), "COMPLETE", "")
    view.ended(trial(1, [9.0]), "COMPLETE", "")
    view.ended(trial(2), "PRUNED", "after evaluation 4 of 10")
    view.ended(trial(3), "FAIL", "no such level")
    view.ended(trial(4), "FAIL", "interrupted")
    view.close()


def test_events_are_plain_lines_where_there_is_no_terminal():
    stream, clock = io.StringIO(), iter(range(0, 1000, 40))
    events(StudyView(6, 1, None, stream, lambda: next(clock)))
    assert stream.getvalue().splitlines() == [
        "trial 0 started: agent.n_step=3  learner.learning_rate=0.000123",
        "trial 0  evaluation 1: 12",
        "trial 0 (2 of 6): score 50 (the best so far), 20,000 steps in 1:15",
        "trial 1 (3 of 6): score 9 (best 50), 20,000 steps in 1:15",
        "trial 2 (4 of 6): pruned after evaluation 4 of 10",
        "trial 3 (5 of 6): failed: no such level",
        "trial 4 interrupted"]


def test_evaluations_are_not_a_line_each_unless_they_are_rare():
    stream = io.StringIO()
    view = StudyView(6, stream=stream, now=lambda: 0.0)
    view.evaluated(trial(0, reported=1), 12.0)
    assert stream.getvalue() == ""


def test_a_terminal_shows_the_trials_in_progress(monkeypatch):
    for name in ("NO_COLOR", "CI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    view = StudyView(6, stream=stream)
    view.started(trial(5))
    view.evaluated(trial(5, reported=2), 31.5)
    assert "trial 5: evaluation 2: 31.5" in stream.getvalue()
    view.close()


def test_a_closed_reader_does_not_end_a_study():
    stream = io.StringIO()
    stream.close()
    events(StudyView(6, stream=stream))


@pytest.mark.parametrize("score", [-5.0, 0.0])
def test_the_best_of_an_earlier_part_counts(score):
    stream = io.StringIO()
    view = StudyView(6, best=score, stream=stream)
    view.ended(trial(0, [-7.0]), "COMPLETE", "")
    assert f"best {score:.0f}" in stream.getvalue()
