"""Whole runs with a parameter server: one learner is a run without sync to the bit; killed, told to stop, going on."""

import json
import signal
import time

import pytest
import torch
from fleet_runs import GENTLE, FleetRun, assert_goes_forward, processes
from real_runs import TINY, newest, records, train, weights_hash

from qfleet import api

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SERVER = ["sync=server", "device=cpu"]
ENDLESS = [*TINY, *SERVER, GENTLE, "learners=2", "parameter_server.shards=2", "total_steps=1000000",
           "eval.period_steps=500", "checkpoint.period_steps=400", "replay.capacity=20000", "run.name=x"]


@pytest.mark.parametrize("overrides,further", [
    (["parameter_server.shards=1"], []),
    (["parameter_server.shards=3", "parameter_server.compensation=adaptive", "parameter_server.compensation_lambda=2"],
     ["total_steps=450"]),
], ids=["one shard", "three shards, compensated, resumed"])
def test_one_learner_is_solo(tmp_path, monkeypatch, overrides, further):
    """Real processes over the real wire, with a checkpoint, a resume and a separate evaluator: weights, target
    network, optimizer, replay, generators and counters."""
    monkeypatch.chdir(tmp_path)
    schedule = ["total_steps=300", "checkpoint.period_steps=200", "eval.period_steps=150"]
    solo = train("cartpole", *schedule, "run.name=solo").directory
    one = train("cartpole", *schedule, "run.name=one", *SERVER, *overrides).directory
    for run in (solo, one) if further else ():
        api.resume(run, further)
    assert weights_hash(solo) == weights_hash(one)
    a, b = newest(solo).state(), newest(one).state()
    assert newest(one).manifest.run == json.loads((one / "run.json").read_text())["id"]
    assert [name for name, _ in newest(solo).segments()] == [name for name, _ in newest(one).segments()]
    for name in ("mean", "square", "steps"):
        assert torch.equal(a["learner"]["gradients"][name], b["learner"]["gradients"][name])
    assert all(torch.equal(value, b["learner"]["target"][name]) for name, value in a["learner"]["target"].items())
    assert torch.equal(a["learner"]["rng"], b["learner"]["rng"]) and a["replay"]["rng"] == b["replay"]["rng"]
    assert (a["learner"]["updates"], a["meter"]["episodes"]) == (b["learner"]["updates"], b["meter"]["episodes"])
    size = sum(value.numel() for value in newest(one).policy().values())
    volumes = {record["comm/bytes_per_update"] for record in records(one) if "comm/bytes_per_update" in record}
    assert volumes == {8.0 * size}, "float32 gradients up and weights down at every update"
    stale = [sum(n for tag, n in record.items() if tag.startswith("server/staleness_")) for record in records(one)]
    assert stale[-1] > 0 and records(one)[-1]["server/staleness_0"] == stale[-1], "alone, nothing is ever stale"


def test_killed_told_to_end_and_dealt_anew_it_is_saved_gone_and_goes_on(tmp_path, monkeypatch):
    with FleetRun("train", "cartpole", *ENDLESS, cwd=tmp_path) as squad:
        squad.until(lambda: len(squad.checkpoints) > 1, 120)
        squad.head.kill()
        squad.head.wait()
        private, since = next(squad.tmp.glob("qfleet-*")), time.monotonic()
        while private.exists() or any(str(private) in word for _, words in processes() for word in words):
            assert time.monotonic() < since + 30, "processes, sockets and folder are to be gone by now"
            time.sleep(0.05)
        print(f"gone after {time.monotonic() - since:.1f} s")
    saved, old = newest(squad.run), newest(squad.run).state()
    with FleetRun("resume", "x", "learners=3", "parameter_server.shards=1", cwd=tmp_path) as again:
        again.until(lambda: (pulse := again.pulse()) and pulse.updates > saved.manifest.updates + 50, 120)
        again.until(lambda: len(again.now().members) == 4, 120)
        again.head.send_signal(signal.SIGINT)
        code, result = again.ended(120)
        again.assert_gone()
        assert code == 130, again.complaints
    assert result["steps"] > saved.manifest.step and result["saved_at"] == result["steps"]
    state = newest(again.run).state()
    assert len(state["ranks"]) == 2 and state["steps"] == result["steps"]
    chunks = [part["replay"]["next"] - part["replay"]["first"] for part in [state, *state["ranks"]]]
    before = [part["replay"]["next"] - part["replay"]["first"] for part in [old, *old["ranks"]]]
    assert min(chunks) >= sum(before) // 3 and sum(chunks) > sum(before), "the replay was dealt to all"
    monkeypatch.chdir(tmp_path)
    last = api.resume("x", ["learners=1", "parameter_server.shards=2", f"total_steps={result['steps'] + 300}"])
    assert (last.exit_code, last.reason) == (0, "total_steps") and last.updates > result["updates"]
    assert last.episodes > result["episodes"] and "ranks" not in newest(again.run).state()
    assert_goes_forward(again.run)


def test_without_restarts_the_coordinators_death_is_the_runs_end_and_it_can_go_on(tmp_path):
    with FleetRun("train", "cartpole", *ENDLESS, cwd=tmp_path) as squad:
        squad.until(lambda: squad.checkpoints, 120)
        squad.kill("coordinator")
        code, _ = squad.ended(120)
        squad.assert_gone(30)
    assert code == 1 and "qfleet resume" in squad.complaints and newest(squad.run).manifest.updates > 0
