"""Metrics of a run with remote actors: members, policy lag, restarts, shares of the wall time."""

import json
import time

import pytest

from qfleet.config import to_yaml
from qfleet.runconfig.auto import resolve_auto
from qfleet.runconfig.build import make_agent, make_env, make_plan
from qfleet.runconfig.resolution import resolve
from qfleet.training.learner_core import Hooks
from qfleet.training.learner_run import LearnerRun
from qfleet.training.remote_actors import RemoteActorsSetup
from qfleet.transport.fleet_pb2 import ExchangeRequest
from qfleet.transport.inbox import Inbox
from qfleet.transport.published_state import PublishedState
from qfleet.transport.registry import Registry

TINY = ["agent.hidden=[8]", "env.lanes=2", "replay.chunk_steps=4", "replay.min_steps=32", "learner.batch_size=8",
        "actors=2", "run.threads=1", "total_steps=1000"]


@pytest.fixture
def fleet():
    config = resolve("cartpole", TINY).config
    env = make_env(config.env, 1)
    spec = env.spec
    env.close()
    config = resolve_auto(config, spec)
    records = []

    class Sink:
        write = records.append

        def flush(self): ...

    hooks = Hooks([Sink()], lambda snapshot: None, lambda *best: True, lambda *bad: None)
    setup = RemoteActorsSetup(
        make_agent(config, spec), spec, PublishedState(to_yaml(config), json.dumps(spec.to_json()), 2),
        Registry(2, 30.0), Inbox(4, config.waiting_steps(config.env.lanes)))
    fleet = LearnerRun(setup, make_plan(config), hooks)
    fleet.records = records
    return fleet


def hello(fleet, name, session, role="actor"):
    return fleet.setup.registry.hello(name, role, "here", 1, session)


def emitted(fleet):
    fleet.core.meter.emit()
    return fleet.records[-1]


def test_live_actors_policy_lag_and_restarts(fleet):
    hello(fleet, "actor/0", "a")
    hello(fleet, "actor/1", "b")
    hello(fleet, "evaluator", "e", "evaluator")
    fleet.core.clock.set_updates(10)
    fleet.setup.registry.record_heartbeat(0, 1, 100, 4)
    record = emitted(fleet)
    assert record["fleet/actors"] == 2 and record["fleet/policy_lag"] == (6 + 10) / 2 and record["fleet/inbox"] == 0
    assert "fleet/restarts" not in record, "the first registration is not a restart"
    hello(fleet, "actor/1", "b")  # the same process, reconnected
    assert "fleet/restarts" not in emitted(fleet)
    hello(fleet, "actor/1", "c")
    hello(fleet, "evaluator", "f", "evaluator")
    assert emitted(fleet)["fleet/restarts"] == 2
    hello(fleet, "actor/1", "d")
    assert emitted(fleet)["fleet/restarts"] == 3


def test_reuse_of_an_index_by_another_member_is_not_a_restart(fleet):
    index, incarnation = hello(fleet, "far/0", "a")
    emitted(fleet)
    fleet.setup.registry.deregister(index, incarnation)
    assert hello(fleet, "near/0", "b")[0] == index
    assert "fleet/restarts" not in emitted(fleet)


def test_the_share_of_time_with_messages_held_back_is_measured(fleet):
    index, incarnation = hello(fleet, "actor/0", "a")
    limiter = fleet.core.replay.rate_limiter
    limiter.error_buffer = 0.0
    limiter.start_counting()
    limiter.clock.count_steps(limiter.min_steps + 100)
    fleet.acting.message_handler.inbox.offer(ExchangeRequest(index=index, incarnation=incarnation, sequence=1, steps=7))
    emitted(fleet)
    assert not fleet.acting.message_handler.step()
    time.sleep(0.1)
    assert not fleet.acting.message_handler.step()
    held = emitted(fleet)["fleet/backpressure_share"]
    assert 0.5 < held <= 1.0
    limiter.count_samples(10**6)
    fleet.acting.message_handler.step()  # applies the message
    time.sleep(0.1)
    fleet.acting.message_handler.step()
    assert emitted(fleet)["fleet/backpressure_share"] < 0.2
    assert fleet.core.progress().steps == limiter.min_steps + 107


def test_sleep_counts_as_idle_time(fleet):
    emitted(fleet)
    fleet.acting.serve(0.08)
    fleet.acting.serve(0)
    assert emitted(fleet)["time/idle_share"] > 0.5
