"""The one loop, and when it ends."""

import itertools

import pytest
import torch

from qfleet.core.schedule import Progress
from qfleet.learner.learner import LearnerConfig
from qfleet.replay.config import ReplayConfig
from qfleet.training.checkpointer import CheckpointConfig
from qfleet.training.evaluation import EvalConfig
from qfleet.training.loop import NAP_S, StopRule, TrainingPlan, drive, idle


class Taped:
    """A worker that writes its name on the tape and is busy as often as it is told."""

    def __init__(self, name, tape, busy=0):
        self.name, self.tape, self.busy = name, tape, busy

    def step(self):
        self.tape.append(self.name)
        self.busy -= 1
        return self.busy >= 0


def test_workers_take_turns_in_order_and_idle_rounds_nap():
    tape, naps, rounds = [], [], itertools.count()
    workers = [Taped("actor", tape, busy=2), Taped("learner", tape, busy=1)]
    drive(workers, lambda: next(rounds) == 3, naps.append)
    assert tape == ["actor", "learner"] * 3
    assert naps == [0, 0, NAP_S], "nobody naps while somebody is busy"


def test_a_run_that_is_over_does_not_begin():
    tape = []
    drive([Taped("actor", tape)], lambda: True, tape.append)
    assert tape == []


def test_every_worker_has_its_turn_even_when_one_is_idle():
    tape, rounds = [], itertools.count()
    drive([Taped("idle", tape), Taped("busy", tape, busy=9)], lambda: next(rounds) == 2, lambda nap: None)
    assert tape == ["idle", "busy"] * 2


def test_rest_sleeps_only_when_there_is_time(monkeypatch):
    slept = []
    monkeypatch.setattr("time.sleep", slept.append)
    idle(0)
    idle(0.5)
    assert slept == [0.5]


def stop_with(clock, **limits):
    values = {"total_steps": 100, "total_updates": None, "stop_at": None} | limits
    plan = TrainingPlan(
        seed=1, device=torch.device("cpu"), exact_resume=False, log_period_steps=10, slack_samples=100.0,
        log_period_updates=None, replay=ReplayConfig(), learner=LearnerConfig(), eval=EvalConfig(),
        checkpoint=CheckpointConfig(), **values)
    return StopRule(plan, lambda: clock[0])


@pytest.mark.parametrize(("now", "reason"), [((99, 10**6), None), ((100, 0), "total_steps"), ((131, 0), "total_steps")])
def test_steps_end_a_run(now, reason):
    stop = stop_with([Progress(*now)])
    assert stop() == (reason is not None) and stop.reason == reason and not stop.is_external


def test_updates_end_a_run_and_steps_go_first():
    clock = [Progress(0, 6)]
    stop = stop_with(clock, total_updates=7)
    assert not stop()
    clock[0] = Progress(0, 7)
    assert stop() and stop.reason == "total_updates"
    both = stop_with([Progress(100, 7)], total_updates=7)
    assert both() and both.reason == "total_steps"


def test_a_score_ends_a_run_if_it_is_wanted():
    stop = stop_with([Progress(0, 0)], stop_at=475.0)
    stop.check_score(474.9)
    assert not stop()
    stop.check_score(475.0)
    assert stop() and stop.reason == "stop_at" and not stop.is_external
    indifferent = stop_with([Progress(0, 0)])
    indifferent.check_score(1e9)
    assert not indifferent()


@pytest.mark.parametrize("reason", ["interrupted", "preempted"])
def test_what_somebody_outside_says_stays(reason):
    stop = stop_with([Progress(100, 0)])
    stop.reason = reason
    assert stop() and stop.reason == reason and stop.is_external
