"""Several learners, each with actors of its own: killed, told to stop, resumed in other numbers.

Every observation of the environment is another, so a transition that is stored twice, or lost on its way, is seen.
"""

import json
import signal

import pytest
from fleet_envs import Ledger
from fleet_runs import SMALL, FleetRun, assert_goes_forward, stored
from real_runs import newest

from qfleet import api
from qfleet.runs.membership import read_members

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ENDLESS = [*SMALL, "learners=2", "actors=2", "env.max_episode_steps=100", "total_steps=1000000",
           "eval.period_steps=null", "checkpoint.period_steps=300", "replay.capacity=100000", "run.log_period_steps=50",
           "fleet.heartbeat_timeout_s=20", "run.name=x"]
SYNC = {"allreduce": ["sync=allreduce", "allreduce.timeout_s=20"],
        "server": ["sync=server", "parameter_server.shards=1"]}


def members(run):
    """Members of all learners that were heard recently, by name."""
    return {each["name"]: each for each in read_members(run.run).get("members", []) if each["silent_s"] < 3}


def actors(run):
    return {name: each["pid"] for name, each in members(run).items() if each["role"] == "actor"}


def all_actors(run, number):
    """Process ids of so many actors, as soon as all of them are in contact."""
    return run.until(lambda: len(found := actors(run)) == number and found)


def takes_part(run, name, pid):
    """Wait until another process has this name, and has acted."""
    return run.until(
        lambda: (found := members(run).get(name)) and found["pid"] != pid and found["steps"] > 20 and found)


def learns_on(run, by=20):
    """Wait until that many more updates and steps are recorded; learning may first go back to a checkpoint."""
    before = run.metrics()[-1]
    run.until(lambda: (last := run.metrics()[-1])["updates"] > before["updates"] + by and last["step"] > before["step"])


def begin(run, number):
    run.until(lambda: run.checkpoints)
    run.until(lambda: run.metrics()[-1].get("fleet/actors") == number)  # those of all learners
    return all_actors(run, number)


def stops_saved(run):
    """A run that receives SIGTERM saves all its steps, and all its processes exit."""
    run.head.send_signal(signal.SIGTERM)
    code, result = run.ended(60)
    assert code == 75, run.complaints
    run.assert_gone()
    assert result["saved_at"] == result["steps"] == newest(run.run).manifest.step
    return result


def parts_of(run):
    state = newest(run).state()
    return [state, *state.get("ranks", [])]


def ledger(run, previous=frozenset()):
    """What is stored: nothing twice, nothing that a checkpoint had is missing."""
    seen, _ = stored(run)
    for times in seen.values():
        assert len(times) == len(set(times)), "stored twice"
    found = {(name, t) for name, times in seen.items() for t in times}
    assert previous <= found, "a checkpoint had more"
    return found


def assert_complete(run, gaps=0):
    """All observations of an environment are stored, from its first one on, but for so many gaps."""
    seen, rows = stored(run)
    missing = [max(times) + 1 - len(times) for times in seen.values()]
    assert sum(number > 0 for number in missing) <= gaps, missing
    steps, senders = newest(run).manifest.step, len(seen)
    unsent = steps * (Ledger.episode + 1) / Ledger.episode - sum(map(len, seen.values()))
    assert -senders * (rows + 2) <= unsent <= senders * (rows + 2) + sum(missing), (steps, unsent, rows, missing)


def test_averaging_learners_with_actors_survive_deaths_and_go_on_in_other_numbers(tmp_path):
    with FleetRun("train", "fleet_envs:Ledger", *ENDLESS, *SYNC["allreduce"], cwd=tmp_path) as run:
        before = begin(run, 2)
        killed = run.kill("actor/1")
        assert takes_part(run, "actor/1", killed)["incarnation"] == 2, "in its place"
        stay = all_actors(run, 2)
        assert stay["actor/0"] == before["actor/0"]
        ranks = {name: pid for name, pid in run.pids().items() if name in ("0/2", "1/2")}
        assert len(ranks) == 2
        run.kill("1/2")
        run.until(lambda: all(run.pids().get(name, pid) != pid for name, pid in ranks.items()))
        run.until(lambda: actors(run) == stay)
        learns_on(run)
        assert all_actors(run, 2) == stay, "actors wait for their learners"
        stops_saved(run)
    parts = parts_of(run.run)
    assert len(parts) == 2 and sum(part["clock"]["steps"] for part in parts) == newest(run.run).manifest.step
    assert_complete(run.run, gaps=4)
    assert len(json.loads((run.run / "run.json").read_text())["attempts"]) == 2
    found = ledger(run.run)
    with FleetRun("resume", "x", "learners=1", "actors=2", cwd=tmp_path) as run:
        first = newest(run.run).manifest.step
        run.until(lambda: newest(run.run).manifest.step > first)
        run.head.kill()
        run.head.wait()
        run.assert_gone(30)
    assert len(parts_of(run.run)) == 1
    found = ledger(run.run, found)
    with FleetRun("resume", "x", "learners=2", "actors=4", cwd=tmp_path) as run:
        run.until(lambda: actors(run).keys() == {f"actor/{index}" for index in range(4)})
        learns_on(run)
        stops_saved(run)
    found = ledger(run.run, found)
    assert_goes_forward(run.run)


def test_learners_of_a_parameter_server_with_actors_survive_deaths_and_go_on_in_other_numbers(tmp_path, monkeypatch):
    with FleetRun("train", "fleet_envs:Ledger", *ENDLESS, *SYNC["server"], cwd=tmp_path) as run:
        before = begin(run, 2), run.pids()
        killed = run.kill("actor/1")
        assert takes_part(run, "actor/1", killed)["incarnation"] == 2
        stay = all_actors(run, 2)
        killed = run.kill("learner/1")
        run.until(lambda: run.pids().get("learner/1", killed) != killed)
        run.until(lambda: (found := members(run).get("learner/1")) and found["pid"] != killed)
        run.until(lambda: actors(run) == stay)
        steps = run.until(lambda: members(run).get("actor/1"))["steps"]
        run.until(lambda: members(run).get("actor/1", {"steps": 0})["steps"] > steps + 50)  # its learner takes them
        assert run.pids()["learner/0"] == before[1]["learner/0"] and stay["actor/0"] == before[0]["actor/0"]
        learns_on(run)
        stops_saved(run)
    state, parts = newest(run.run).state(), parts_of(run.run)
    assert len(parts) == 2
    assert sum(part["clock"]["steps"] for part in parts) <= state["steps"] == newest(run.run).manifest.step
    found = ledger(run.run)
    monkeypatch.chdir(tmp_path)
    last = api.resume("x", ["actors=0", "learners=1", f"total_steps={newest(run.run).manifest.step + 200}"])
    assert (last.exit_code, last.reason) == (0, "total_steps")
    ledger(run.run, found)
    assert_goes_forward(run.run)
