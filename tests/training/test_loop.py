"""The main loop and its stop rule."""

import itertools

import pytest
import torch

from qfleet.core.clock import Progress
from qfleet.learner.learner import LearnerConfig
from qfleet.replay.config import ReplayConfig
from qfleet.training.checkpointer import CheckpointConfig
from qfleet.training.evaluation import EvalConfig
from qfleet.training.loop import IDLE_SLEEP_S, StopRule, TrainingPlan, drive, idle
from qfleet.training.rank_run import ConsensusStop


class RecordingWorker:
    """Worker that logs its name on every step and is busy for the first `busy` steps."""

    def __init__(self, name, log, busy=0):
        self.name, self.log, self.busy = name, log, busy

    def step(self):
        self.log.append(self.name)
        self.busy -= 1
        return self.busy >= 0


def test_workers_take_turns_in_order_and_only_idle_rounds_sleep():
    log, sleeps, rounds = [], [], itertools.count()
    workers = [RecordingWorker("actor", log, busy=2), RecordingWorker("learner", log, busy=1)]
    drive(workers, lambda: next(rounds) == 3, sleeps.append)
    assert log == ["actor", "learner"] * 3
    assert sleeps == [0, 0, IDLE_SLEEP_S], "no sleep while a worker is busy"


def test_a_run_that_has_ended_takes_no_step():
    log = []
    drive([RecordingWorker("actor", log)], lambda: True, log.append)
    assert log == []


def test_every_worker_has_its_turn_even_when_one_is_idle():
    log, rounds = [], itertools.count()
    workers = [RecordingWorker("idle", log), RecordingWorker("busy", log, busy=9)]
    drive(workers, lambda: next(rounds) == 2, lambda sleep_s: None)
    assert log == ["idle", "busy"] * 2


def test_idle_sleeps_only_for_a_positive_time(monkeypatch):
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
def test_total_steps_ends_a_run(now, reason):
    stop = stop_with([Progress(*now)])
    assert stop() == (reason is not None) and stop.reason == reason and not stop.is_external


def test_total_updates_ends_a_run_and_total_steps_takes_precedence():
    clock = [Progress(0, 6)]
    stop = stop_with(clock, total_updates=7)
    assert not stop()
    clock[0] = Progress(0, 7)
    assert stop() and stop.reason == "total_updates"
    both = stop_with([Progress(100, 7)], total_updates=7)
    assert both() and both.reason == "total_steps"


def test_a_score_ends_a_run_only_with_stop_at():
    stop = stop_with([Progress(0, 0)], stop_at=475.0)
    stop.check_score(474.9)
    assert not stop()
    stop.check_score(475.0)
    assert stop() and stop.reason == "stop_at" and not stop.is_external
    without_target = stop_with([Progress(0, 0)])
    without_target.check_score(1e9)
    assert not without_target()


@pytest.mark.parametrize("reason", ["interrupted", "preempted"])
def test_an_external_reason_is_not_overwritten(reason):
    stop = stop_with([Progress(100, 0)])
    stop.reason = reason
    assert stop() and stop.reason == reason and stop.is_external


@pytest.mark.parametrize("proposal", ["stop_at", "preempted", "interrupted"])
def test_ranks_end_together_by_the_clock_whatever_one_of_them_has_proposed_since_the_last_vote(proposal):
    clock = [Progress(99, 0)]
    plan = stop_with(clock).plan
    one, other = (ConsensusStop(plan, lambda: clock[0], single=False) for _ in range(2))
    assert not one() and not other()
    one.reason = proposal  # not known to the other rank
    assert not one() and not other()
    clock[0] = Progress(100, 0)
    assert one() and other() and one.reason == other.reason == "total_steps"
