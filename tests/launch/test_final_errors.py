"""Errors of learners that a restart would not cure end the process with the code that prevents one."""

import logging
from types import SimpleNamespace

import pytest

from qfleet.core.errors import CallbackError
from qfleet.launch import learner_node, rank_node
from qfleet.launch.attempt import describe_final_error
from qfleet.launch.run_request import RunRequest
from qfleet.process.supervisor import EXIT_CALLBACK_FAILED


def failed_callback():
    error = CallbackError("callback Mine.on_step raised ValueError: out of luck")
    try:
        raise ValueError("out of luck")
    except ValueError as cause:
        error.__cause__ = cause
    return error


@pytest.fixture
def failing(monkeypatch):
    """Training that fails in a callback."""
    def fail(*arguments):
        raise failed_callback()

    monkeypatch.setattr(learner_node, "serve_run", fail)
    monkeypatch.setattr(rank_node, "train_rank", fail)


def test_a_learner_whose_callback_failed_is_not_restarted(failing, tmp_path, caplog):
    RunRequest(str(tmp_path), {}, {}).write(tmp_path)
    assert learner_node.run_learner(tmp_path) == EXIT_CALLBACK_FAILED
    assert caplog.messages[-1] == "training failed: callback Mine.on_step raised ValueError: out of luck"


def test_a_rank_whose_callback_failed_is_not_restarted(failing, tmp_path):
    reports = []
    request = RunRequest(str(tmp_path), {}, {})
    assert rank_node.serve_rank(request, SimpleNamespace(rank=0), None, None, reports.append) == EXIT_CALLBACK_FAILED
    assert reports == ["training failed: callback Mine.on_step raised ValueError: out of luck"]


def test_the_traceback_of_a_callback_is_logged_once(caplog):
    with caplog.at_level(logging.ERROR):
        describe_final_error(failed_callback())
    assert len(caplog.messages) == 1 and 'raise ValueError("out of luck")' in caplog.messages[0]
