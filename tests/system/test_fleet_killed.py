"""One fleet whose processes are killed and stopped, one after the other, and which goes on learning.

The tests share it, in this order: each leaves it alive for the next.
"""

import os
import signal
import time

import pytest
from fleet_runs import GENTLE, SMALL, FleetRun, assert_goes_forward
from fleet_soak import kill_learner
from real_runs import newest, records

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]
BATTERED = [*SMALL, GENTLE, "actors=2", "total_steps=1000000", "eval.period_steps=300", "checkpoint.period_steps=400",
            "fleet.heartbeat_timeout_s=7", "fleet.actor_restarts=20", "run.name=x"]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    with FleetRun("train", "cartpole", *BATTERED, "--restarts", "30", cwd=tmp_path_factory.mktemp("battered")) as run:
        run.until(lambda: len(((pulse := run.pulse()) and pulse.members) or ()) == 3)
        run.learns()
        run.until(run.metrics)
        yield run


def reborn(fleet, name, pid, timeout=60):
    """Wait until the process of that name is another one, which takes part."""
    return fleet.until(lambda: (found := fleet.member(name)) and found.pid != pid and found.silent_s < 2 and found,
                       timeout)


def counted(fleet, tag, value, timeout=90):
    return fleet.until(lambda: fleet.metrics()[-1].get(tag, 0) >= value, timeout)


def test_a_killed_actor_comes_back_in_its_place_and_the_others_do_not_notice(fleet):
    before = {each.name: (each.index, each.incarnation, each.pid) for each in fleet.now().members}
    restarts = fleet.metrics()[-1].get("fleet/restarts", 0)
    pid, updates, since = fleet.kill("actor/1"), fleet.now().updates, time.monotonic()
    fleet.until(lambda: fleet.now().updates > updates + 20, 30)
    after = reborn(fleet, "actor/1", pid)
    print(f"back after {time.monotonic() - since:.1f} s")
    assert (after.index, after.incarnation) == (1, before["actor/1"][1] + 1), "the same place, so the same arm"
    fleet.until(lambda: fleet.member("actor/1").steps > 50)
    for name in ("actor/0", "evaluator"):
        assert (fleet.member(name).index, fleet.member(name).incarnation, fleet.pids()[name]) == before[name]
    counted(fleet, "fleet/restarts", restarts + 1)
    assert "actor/1 was killed by SIGKILL: perhaps out of memory, lower env.lanes or actors; restart 1 of" in \
        fleet.complaints


def test_without_actors_the_learner_waits_for_the_pace(fleet):
    pids = {name: fleet.kill(name) for name in ("actor/0", "actor/1")}
    fleet.until(lambda: fleet.pids().keys().isdisjoint(pids), 30)
    time.sleep(0.5)  # what lies in the inbox is learnt from
    first = fleet.pulse()
    time.sleep(0.4)
    second = fleet.pulse()
    if fleet.pids().keys().isdisjoint(pids):
        assert (second.steps, second.updates) == (first.steps, first.updates), "nothing new, so nothing is learnt"
    for name, pid in pids.items():
        reborn(fleet, name, pid)
    fleet.learns()
    newer = fleet.metrics()[-1]["step"]
    fleet.until(lambda: fleet.metrics()[-1]["step"] > newer)
    assert 3.5 < fleet.metrics()[-1]["replay/samples_per_insert"] < 4.05


def test_a_stopped_actor_and_a_killed_evaluator_are_replaced_while_training_goes_on(fleet):
    # It beats by now: a first beat is waited for far longer.
    fleet.until(lambda: (actor := fleet.member("actor/0")) is not None and actor.steps > 0)
    stopped, killed, since = fleet.kill("actor/0", signal.SIGSTOP), fleet.kill("evaluator"), time.monotonic()
    asked = fleet.kill("actor/1", signal.SIGTERM)  # by somebody else: it leaves in order, and its place is free
    reborn(fleet, "actor/1", asked)
    updates = fleet.now().updates
    fleet.until(lambda: fleet.now().updates > updates + 20, 30)
    reborn(fleet, "evaluator", killed)
    seen = sum("eval/mean_reward" in record for record in fleet.metrics())
    fleet.until(lambda: sum("eval/mean_reward" in record for record in fleet.metrics()) > seen)
    assert reborn(fleet, "actor/0", stopped).index == 0
    print(f"back after {time.monotonic() - since:.1f} s")
    assert time.monotonic() - since > 7 and not os.path.exists(f"/proc/{stopped}")
    assert "actor/0 sent no heartbeat for 7 s and was killed" in fleet.complaints


@pytest.mark.parametrize("delay_s", [0.1, None, None], ids=["soon", "saving", "saving again"])
def test_a_killed_learner_is_resumed_and_the_others_stay(fleet, delay_s):
    """At some moments, among them the middle of a checkpoint; `make soak` does it 20 times."""
    print(f"answers after {kill_learner(fleet, delay_s):.1f} s")


def test_a_stopped_learner_is_replaced(fleet):
    epoch, since = fleet.now().epoch, time.monotonic()
    fleet.kill("learner", signal.SIGSTOP)
    fleet.until(lambda: (pulse := fleet.pulse()) and pulse.epoch != epoch)
    print(f"answers after {time.monotonic() - since:.1f} s")
    fleet.learns()
    assert "learner sent no heartbeat for 7 s and was killed" in fleet.complaints


def test_in_the_end_all_that_is_left_is_a_run_that_can_go_on(fleet):
    fleet.head.send_signal(signal.SIGTERM)
    code, result = fleet.ended()
    fleet.assert_gone()
    assert code == 75 and result["saved_at"] == result["steps"] == newest(fleet.run).manifest.step
    assert_goes_forward(fleet.run)
    last = records(fleet.run)[-1]
    assert last["step"] == result["steps"] and last["episodes"] == result["episodes"]
    lives = newest(fleet.run).state()["actor_registry"]["lives"]
    assert {(name, index) for name, index, *_ in lives} == {("actor/0", 0), ("actor/1", 1), ("evaluator", -1)}
