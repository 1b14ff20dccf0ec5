"""Weights for another network: what fits is taken, and what does not is named."""

from __future__ import annotations

import pytest
import torch
from checkpoint_kit import SPEC

from qfleet.core.errors import UserError
from qfleet.runs.checkpoint import CheckpointMeta, Checkpoints, open_checkpoint
from qfleet.runs.transfer import LINES, match_weights, matching_weights

THEIRS = {"body.weight": torch.ones(3, 4), "head.weight": torch.ones(2, 3), "head.bias": torch.ones(2)}
CONFIG = "seed: 1\nagent: {algo: dqn, hidden: [3], dueling: false}\n"


@pytest.fixture
def checkpoint(tmp_path):
    return open_checkpoint(Checkpoints(tmp_path, 1).save_policy(1, 1, THEIRS, CheckpointMeta(CONFIG, SPEC)))


def zeros(**shapes):
    return {name.replace("_", "."): torch.zeros(shape) for name, shape in shapes.items()}


def test_equal_networks_fit_whole(checkpoint):
    found = matching_weights(
        checkpoint, zeros(head_weight=(2, 3), head_bias=(2,), body_weight=(3, 4)), CONFIG, partial=False
    )
    assert set(found.taken) == set(THEIRS) and found.unfit == []
    assert all(torch.equal(found.taken[name], THEIRS[name]) for name in THEIRS)


def test_name_and_shape_decide_what_is_taken():
    found = match_weights(THEIRS, zeros(body_weight=(3, 4), head_weight=(4, 3), tail_bias=(7,)))
    assert set(found.taken) == {"body.weight"}
    assert found.unfit == ["head.weight: (2, 3) in the checkpoint, (4, 3) here",
                           "tail.bias: none in the checkpoint, (7,) here",
                           "head.bias: (2,) in the checkpoint, none here"]


def test_another_network_is_refused_with_its_tensors_and_keys(checkpoint):
    mine, config = zeros(body_weight=(3, 4), head_weight=(4, 3), head_bias=(4,)), CONFIG.replace("[3]", "[5]")
    with pytest.raises(UserError) as caught:
        matching_weights(checkpoint, mine, config, partial=False)
    told = str(caught.value).splitlines()
    assert told[1:4] == ["head.weight: (2, 3) in the checkpoint, (4, 3) here",
                         "head.bias: (2,) in the checkpoint, (4,) here",
                         "agent.hidden: [3] in the checkpoint, [5] here"]
    assert "init_partial=true" in told[4]
    assert set(matching_weights(checkpoint, mine, config, partial=True).taken) == {"body.weight"}


def test_nothing_to_take_is_no_partial_success(checkpoint):
    with pytest.raises(UserError, match="no tensor fits: leave out init_from"):
        matching_weights(checkpoint, zeros(body_weight=(4, 4)), CONFIG, partial=True)


def test_many_differences_are_counted(checkpoint):
    mine = {f"layer.{i}": torch.zeros(1) for i in range(50)} | zeros(body_weight=(3, 4))
    with pytest.raises(UserError, match=f"and {50 + 2 - LINES} more tensors") as caught:
        matching_weights(checkpoint, mine, "agent: 3\n", partial=False)
    assert len(str(caught.value).splitlines()) == 1 + LINES + 1 + 3 + 1, "tensors, their count, keys, remedy"
