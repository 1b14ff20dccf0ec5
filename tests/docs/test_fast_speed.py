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


def test_newer_checks_of_whole_updates_stand_beside_the_older_ones(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import derived

    def row(commit, precision, early, late, met=False):
        return {"kind": "check", "met": met, "commit": commit, "precision": precision, "distance_early": early,
                "distance": late}

    records = [row("a", "fp32", 0.0, 0.5, met=True), row("a", "fp32", 0.001, 0.004), row("a", "bf16", 0.002, 0.019),
               row("b", "fp32", 0.006, 0.1), row("b", "bf16", 0.011, 0.2), row("b", "fp32", 0.005, 0.15)]
    assert derived.taped(records) == {
        "apart": 0.5, "before": {"early fp32": 0.001, "early bf16": 0.002, "all": 0.019},
        "whole": {"early fp32": 0.006, "early bf16": 0.011, "all": 0.2}}
