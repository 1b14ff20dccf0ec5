"""Errors of learners, ranks and workers as exit codes, by one function."""

import pytest

from qfleet.core.errors import CallbackError, ProcessFault, RunLost, UserError
from qfleet.launch.learner_main import exit_code
from qfleet.learner.learner import Diverged
from qfleet.process.restart_group import EXIT_PEER_LOST
from qfleet.process.supervisor import EXIT_UNRECOVERABLE, ChildFailure
from qfleet.sync.process_group import RankLost


def failing(error):
    def work():
        raise error

    return work


@pytest.mark.parametrize(("error", "code", "text"), [
    (Diverged("not finite"), EXIT_UNRECOVERABLE, "training failed: not finite"),
    (RunLost("deleted"), EXIT_UNRECOVERABLE, "training failed: deleted"),
    (RankLost("rank 1 is gone"), EXIT_PEER_LOST, "rank 1 is gone")])
def test_errors_that_the_supervisor_has_to_know_are_reported_and_have_a_code(error, code, text):
    reported = []
    assert exit_code(failing(error), reported.append) == code
    assert reported == [text]


@pytest.mark.parametrize("error", [UserError("wrong"), ProcessFault("dead"), ValueError("a bug")])
def test_other_errors_are_raised(error):
    with pytest.raises(type(error)):
        exit_code(failing(error), pytest.fail)


def test_a_learner_that_ends_well_returns_its_own_code():
    assert [exit_code(lambda code=code: code, pytest.fail) for code in (0, 75)] == [0, 75]


@pytest.mark.parametrize(("code", "kind"), [
    (2, UserError), (1, ProcessFault), (70, ProcessFault), (71, CallbackError), (-9, ProcessFault)])
def test_a_childs_failure_is_raised_as_the_error_that_its_code_stands_for(code, kind):
    assert type(ChildFailure("a", code, "text").error()) is kind
