"""Where a role's time goes: laps by a clock of the test's own, and the figures of actor and learner."""

import itertools

import pytest
import torch
from fakes import SPEC, ListClock, ListMetrics, TapeEnv, TapeReplay, linear_agent, sample_of

from qfleet.actor.actor import TIMED_STEPS, Actor, Recorder
from qfleet.actor.policy import Policy
from qfleet.core import clock as module
from qfleet.core.clock import PhaseTimer
from qfleet.core.replay import Window
from qfleet.explore.constant import Constant
from qfleet.learner.learner import Learner, LearnerConfig
from qfleet.learner.weight_store import Mailbox
from qfleet.replay.layout import Layout


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still unless told; with `ticking`, every look at it takes a millisecond."""
    class Clock:
        now = 0.0
        ticking = False

        def __call__(self):
            self.now += 0.001 * self.ticking
            return self.now

    clock = Clock()
    monkeypatch.setattr(module, "perf_counter", clock)
    return clock


def test_laps_are_means_per_turn_over_a_period(clock):
    metrics = ListMetrics()
    laps = PhaseTimer(metrics, ("a", "b"), 2)
    for a, b in ((0.010, 0.001), (0.030, 0.003), (9, 9)):
        clock.now += 5  # between two turns somebody else works
        laps.start()
        clock.now += a
        laps.lap("a")
        clock.now += b
        laps.lap("b")
        laps.end_step()
    assert metrics.values == [{"a": pytest.approx(20), "b": pytest.approx(2)}]


def test_a_pause_belongs_to_its_tag_until_the_next_start_that_goes_on(clock):
    metrics = ListMetrics()
    laps = PhaseTimer(metrics, ("work", "wait"), 1)
    for _ in range(3):  # asked again and again, in vain
        laps.start()
        laps.pause("wait")
        clock.now += 0.5
    laps.start()
    clock.now += 0.25
    laps.lap("work")
    laps.end_step()
    assert metrics.values == [{"work": pytest.approx(250), "wait": pytest.approx(1500)}]


def actor_of(replay, metrics):
    agent, env = linear_agent(), TapeEnv([9, 5])
    recorder = Recorder(agent, Layout(SPEC, Window(), 4, agent.columns), env.lanes, replay)
    actor = Actor(Policy(agent, 0, torch.device("cpu")), env, Constant(0.0, 2), metrics, Mailbox(), recorder,
                  ListClock())
    actor.begin([0, 1])
    return actor


def test_an_actor_says_where_its_time_goes_once_per_period(clock):
    clock.ticking = True
    metrics = ListMetrics()
    actor = actor_of(TapeReplay(), metrics)
    for _ in range(2 * TIMED_STEPS + 1):
        assert actor.step()
    assert [set(values) for values in metrics.values] == 2 * [
        {"actor/env_ms", "actor/act_ms", "actor/store_ms", "actor/wait_ms"}, {"rollout/exploration_rate"}]
    # The clock is looked at after receiving, booking, choosing, sending and storing; nobody made the actor wait.
    assert metrics.values[2] == {"actor/env_ms": pytest.approx(2), "actor/act_ms": pytest.approx(1),
                                 "actor/store_ms": pytest.approx(2), "actor/wait_ms": 0}


def test_an_actor_that_has_to_wait_says_how_long(clock):
    replay, metrics = TapeReplay(), ListMetrics()
    actor = actor_of(replay, metrics)
    replay.waiting = True
    refused = 0
    for _ in range(TIMED_STEPS + 20):
        if not actor.step():
            refused += 1
            clock.now += 0.1
            replay.waiting = refused < 3
    assert refused == 3
    assert metrics.values[:1] == [{"actor/env_ms": 0, "actor/act_ms": 0, "actor/store_ms": 0,
                               "actor/wait_ms": pytest.approx(300 / TIMED_STEPS)}]


def test_a_learner_tells_sampling_from_updating(clock):
    clock.ticking = True
    metrics, replay = ListMetrics(), TapeReplay(samples=[sample_of([1.0, 2.0]) for _ in range(4)])
    cfg = LearnerConfig(metrics_period_updates=2, precision="fp32")
    learner = Learner(linear_agent(), replay, Mailbox(), metrics, cfg, 1, torch.device("cpu"))
    learner.step()
    timed = [values for values in metrics.values if "train/sample_ms" in values]
    assert timed == 2 * [{"train/sample_ms": pytest.approx(1), "train/update_ms": pytest.approx(1)}]
    assert learner.updates == 4


def test_the_clock_changes_nothing_that_is_learnt(monkeypatch):
    def weights():
        samples = [sample_of([1.0, -2.0, 0.5]) for _ in range(5)]
        learner = Learner(linear_agent(), TapeReplay(samples=samples), Mailbox(), ListMetrics(),
                          LearnerConfig(precision="fp32"), 1, torch.device("cpu"))
        learner.step()
        return learner.flat.state()

    usual = weights()
    wild = itertools.cycle([3.0, -1e9, 7e12])
    monkeypatch.setattr(module, "perf_counter", lambda: next(wild))
    assert all(torch.equal(usual[name], value) for name, value in weights().items())
