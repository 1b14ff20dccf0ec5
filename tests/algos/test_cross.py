"""Heads × encoders × switches from pictures: every pair of choices meets in some whole update of the real learner."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from fakes import ListMetrics, TapeReplay
from family_kit import ALGOS, OWN_ENCODER, PICTURES, agent, batch_of, config

from qfleet.actor.policy import Policy
from qfleet.core.agent import ExplorationParams
from qfleet.learner.learner import Learner, LearnerConfig
from qfleet.learner.weight_store import Mailbox

FACTORS = {"algo": list(ALGOS), "torso": ["nature", "impala", "own"], "next": ["max", "double", "munchausen"],
           "dueling": [False, True], "noisy": [False, True], "n_step": [1, 3], "rescale": [False, True],
           "weighted": [False, True]}
"""What follows a step is one choice: double has nothing to choose where Munchausen averages."""


def pairs(row):
    return set(itertools.combinations(row.items(), 2))


def pairwise_rows():
    """Rows that contain every pair of values of any two factors: always the next that has most of those missing."""
    rows = [dict(zip(FACTORS, values, strict=True)) for values in itertools.product(*FACTORS.values())]
    missing, chosen = set().union(*map(pairs, rows)), []
    while missing:
        chosen.append(max(rows, key=lambda row: len(pairs(row) & missing)))
        missing -= pairs(chosen[-1])
    return chosen


ROWS = pairwise_rows()


def switches(row):
    spectral = {"spectral_norm": True, "torso_pool": 2} if row["torso"] == "impala" else {}
    network = OWN_ENCODER if row["torso"] == "own" else {"torso": row["torso"]}
    return {name: row[name] for name in ("dueling", "noisy", "n_step", "rescale")} | network | spectral | {
        "double": row["next"] == "double", "munchausen": row["next"] == "munchausen"}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row.values())))
def test_every_pair_of_choices_makes_an_update(row):
    made, items = agent(row["algo"], PICTURES, **switches(row)), 6
    batch = batch_of(row["n_step"] + 1, items, spec=PICTURES)
    if row["weighted"]:
        batch = dataclasses.replace(batch, weight=torch.rand(items, generator=torch.Generator().manual_seed(1)))
    replay = TapeReplay(samples=[batch])
    cfg = LearnerConfig(batch_size=items, precision="fp32", learning_rate=1e-3)
    learner = Learner(made, replay, Mailbox(), ListMetrics(), cfg, 0, torch.device("cpu"))
    before = learner.flat.master.clone()
    assert learner.step() and learner.updates == 1, "the batch was a good one"
    gradient, moved = learner.flat.grad, learner.flat.master != before
    assert gradient.isfinite().all() and learner.flat.master.isfinite().all()
    assert moved.any() and not moved[gradient == 0].any()
    ((_, priorities),) = replay.updates
    assert len(priorities) == items and np.isfinite(priorities).all() and min(priorities) >= 0


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row.values())))
def test_every_pair_of_choices_acts(row):
    made, lanes = agent(row["algo"], PICTURES, **switches(row)), 3
    policy = Policy(made, 0, torch.device("cpu"))
    pictures = {"obs": batch_of(1, lanes, spec=PICTURES).rows["obs.obs"][:, 0].numpy()}
    actions, hints = policy.act(pictures, ExplorationParams(torch.zeros(lanes)))
    assert actions.shape == (lanes,) and actions.max() < PICTURES.num_actions
    assert {name: (value.shape[1:], value.dtype.name) for name, value in hints.items()} == dict(made.priority_inputs)
    assert all(np.isfinite(value).all() for value in hints.values())


def test_no_pair_is_left_out():
    covered = set().union(*map(pairs, ROWS))
    for (a, first), (b, second) in itertools.combinations(FACTORS.items(), 2):
        assert all(((a, x), (b, y)) in covered for x in first for y in second)
    assert {"algo", *switches(ROWS[0])} <= set(type(config("dqn")).model_fields)
