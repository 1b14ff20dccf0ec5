"""Evaluations in a process beside a run that is one process otherwise."""

from __future__ import annotations

import time

import pytest
from fleet_runs import FleetRun, processes
from real_runs import TINY, records, train, weights_hash

from qfleet import api

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), pytest.mark.alone]
BESIDE = ["eval.beside=true", "eval.period_steps=200", "run.threads=1"]


def judged(run):
    return [record for record in records(run) if "eval/mean_reward" in record]


def test_training_is_the_same_whoever_judges_it_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    inside = train("cartpole", "total_steps=1200", "eval.period_steps=200", "run.name=inside").directory
    beside = train("cartpole", "total_steps=1200", *BESIDE, "run.name=beside").directory
    assert weights_hash(inside) == weights_hash(beside)
    found = judged(beside)
    assert found[-1]["updates"] == records(beside)[-1]["updates"]  # the last weights are waited for
    assert all(record["eval/seconds"] > 0 for record in found)
    assert "start 1" in (beside / "logs" / "evaluator.log").read_text()
    assert [words for _, words in processes() if "_member" in words and str(tmp_path) in " ".join(words)] == []

    before = len(found)
    api.resume(beside, ["total_steps=2400"])
    again = judged(beside)[before:]
    assert again[-1]["updates"] == records(beside)[-1]["updates"] > found[-1]["updates"]


def test_nothing_is_judged_before_training_returns_enough(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = train("cartpole", "total_steps=1200", *BESIDE, "eval.from_return=1e9", "run.name=x").directory
    last, = judged(run)
    assert last["updates"] == records(run)[-1]["updates"]


def test_an_evaluator_that_is_killed_is_replaced(tmp_path):
    words = [word for word in TINY if not word.startswith("total_steps")]
    with FleetRun("train", "cartpole", *words, *BESIDE, "total_steps=12000", "stop_at=null", "run.name=x",
                  cwd=tmp_path) as fleet:
        deadline = time.monotonic() + 120
        while not (fleet.run / "metrics.jsonl").exists() or not judged(fleet.run):
            assert time.monotonic() < deadline and fleet.head.poll() is None
            time.sleep(0.1)
        fleet.kill("evaluator")
        assert fleet.head.wait(timeout=150) == 0
        assert "start 2" in (fleet.run / "logs" / "evaluator.log").read_text()
        assert judged(fleet.run)[-1]["updates"] == records(fleet.run)[-1]["updates"]
        assert fleet.everybody() == [] and list(fleet.tmp.iterdir()) == []
