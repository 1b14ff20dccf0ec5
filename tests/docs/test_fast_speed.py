"""The check of recorded updates fails where they are too far from those in pieces; learners are made up here."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).parents[2]


class Learner:
    """Moves its one weight by 1 per step, and by another way if recorded: whole, or its gradient if that is met."""

    def __init__(self, recorded: bool, off: float, met: bool) -> None:
        self.flat = SimpleNamespace(master=torch.zeros(1))
        self._graph_update = SimpleNamespace(_graphs=("graph",)) if recorded and not met else None
        self.gradient_fn = SimpleNamespace(captured=recorded and met)
        self.max_updates_per_step, self._way = 0, 1 + off if recorded else 1.0

    def step(self) -> None:
        self.flat.master += self._way


def checked(monkeypatch, off, met=False):
    """`check` with recordings that are off by so much, by precision."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import fast_speed

    def learner_of(recipe, batch, words, capacity, filled, met):
        given = dict(word.split("=") for word in words)
        return Learner(given["learner.capture"] == "true", off[given["learner.precision"]], met), None

    kept = []
    monkeypatch.setattr(fast_speed, "learner_of", learner_of)
    monkeypatch.setattr(fast_speed, "keep", lambda args, record: kept.append(record))
    try:
        fast_speed.check(argparse.Namespace(recipe="x", set=[], algos=["dqn", "c51", "qr"], met=met))
    except SystemExit as error:
        return kept, str(error)
    return kept, None


@pytest.mark.parametrize("met", [False, True])
def test_recorded_updates_near_those_in_pieces_pass(monkeypatch, met):
    kept, error = checked(monkeypatch, {"fp32": 0.009, "bf16": 0.09}, met)
    assert error is None and len(kept) == 12 and {record["met"] for record in kept} == {met}
    assert {record["tolerance"] for record in kept} == {0.01, 0.1}


@pytest.mark.parametrize("off", [0.02, math.nan])
def test_those_far_from_them_fail_and_are_named(monkeypatch, off):
    kept, error = checked(monkeypatch, {"fp32": off, "bf16": 0.09})
    assert len(kept) == 12, "all are compared first"
    assert error is not None and error.count("fp32") == 6 and "bf16" not in error


def test_learners_of_the_benchmark_make_updates(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import fast_speed

    words = ["device=cpu", "learner.precision=fp32", "replay.min_steps=500"]
    learner, config = fast_speed.learner_of("pong", 8, words, 2000, 1000)
    learner.max_updates_per_step = 1
    assert learner.step() and learner.updates == 1 and config.learner.batch_size == 8


def test_a_table_shows_the_newest_of_several_measurements(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import tables_running

    records = [{"kind": "updates", "batch": 32, "set": ["a=1", "b=2"], "updates_per_s": 1.0},
               {"kind": "updates", "batch": 32, "set": ["b=2", "a=1"], "updates_per_s": 2.0},
               {"kind": "updates", "batch": 32, "set": ["a=1"], "updates_per_s": 3.0}, {"kind": "beside"}]
    assert tables_running.newest(records, kind="updates", batch=32, set=("a=1", "b=2"))["updates_per_s"] == 2.0
    with pytest.raises(IndexError):
        tables_running.newest(records, kind="updates", batch=512)


def test_pong_is_shown_from_all_runs_of_the_recipe_that_were_played_on(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import tables_running

    def run(seconds, step, score, **more):
        return {"kind": "pong", "set": [], "commit": "a", "solved_s": seconds, "judged": [[1.0, step, 19.0, 2.0]],
                "games": {"mean_reward": score}} | more

    records = [run(50.0, 400_000, 20.0), run(70.0, 600_000, 18.0), run(60.0, 500_000, 19.0),
               run(1.0, 1, 21.0, set=["agent.n_step=3"]), run(2.0, 2, 21.0, games=None), {"kind": "updates"}]
    assert list(tables_running.pong(records)) == [
        ("3 runs", "least", "median", "most"), ("seconds", "50", "60", "70"),
        ("environment steps", "400,000", "500,000", "600,000"),
        ("mean score of 30 further games", "18.0", "19.0", "20.0")]
