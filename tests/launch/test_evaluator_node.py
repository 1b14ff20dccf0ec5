"""Evaluations that a learner asks its evaluator process for: each request is answered by one score."""

from types import SimpleNamespace

import pytest

from qfleet.launch.evaluator_node import RequestedEvaluation
from qfleet.training.remote_actors import EvaluatorMember
from qfleet.transport.published_state import PublishedState


class Fleet:
    """A learner's published state and slot, a connection that learns of it at `exchange`, and a fake evaluator."""

    def __init__(self):
        self.published = PublishedState("", "", 1)
        self.updates = 0
        learner = SimpleNamespace(publish=lambda: self.published.publish({}, self.updates))
        self.slot = EvaluatorMember(SimpleNamespace(core=SimpleNamespace(learner=learner), published=self.published))
        self.connection = SimpleNamespace(wanted_version=-1, welcome=SimpleNamespace(epoch="a"))
        self.evaluated_version, self.scores = -1, []
        self.on_evaluation = lambda: None
        self.worker = RequestedEvaluation(self.connection, self)

    def exchange(self):
        self.connection.wanted_version = self.published.status.wanted_version

    def request(self, updates):
        self.updates = updates
        self.slot.request()

    def finish(self, updates):
        self.published.publish({}, updates)
        self.published.request_final_evaluation()

    def evaluate(self):
        version = self.published.weights.version
        self.on_evaluation()
        self.evaluated_version = version
        self.scores.append(version)

    def restart(self):
        self.evaluated_version = -1

    def run(self):
        """Exchange messages and let the evaluator work until nothing is left to do."""
        for _ in range(5):
            self.exchange()
            self.worker.step()


@pytest.fixture
def fleet():
    return Fleet()


def test_nothing_is_evaluated_without_a_request(fleet):
    fleet.published.publish({}, 3)
    fleet.run()
    assert fleet.scores == []


def test_a_request_gives_one_score_although_newer_weights_are_published_meanwhile(fleet):
    fleet.on_evaluation = lambda: (fleet.published.publish({}, 9), fleet.exchange())
    fleet.request(4)
    fleet.run()
    assert fleet.scores == [4]


def test_a_request_that_follows_a_score_at_once_is_not_lost(fleet):
    """The evaluator never hears of a time without a request."""
    fleet.request(4)
    fleet.exchange()
    assert fleet.worker.step()
    fleet.request(9)
    fleet.run()
    assert fleet.scores == [4, 9]


def test_the_last_weights_are_evaluated_after_a_request_just_before_the_end(fleet):
    fleet.request(4)
    fleet.exchange()
    assert fleet.worker.step()
    fleet.finish(9)
    fleet.run()
    assert fleet.scores == [4, 9]


def test_weights_that_were_evaluated_already_are_not_evaluated_again(fleet):
    fleet.request(4)
    fleet.run()
    fleet.request(4)
    fleet.finish(4)
    fleet.run()
    assert fleet.scores == [4]


def test_a_resumed_learner_is_evaluated_again_at_the_same_version(fleet):
    fleet.finish(4)
    fleet.run()
    fleet.connection.welcome.epoch = "b"
    fleet.run()
    assert fleet.scores == [4, 4]
