"""Schedules of exploration by hand-computed points."""

import pytest
import torch

from qfleet.explore import constant, ladder, linear


def test_linear_falls_and_stays():
    explorer = linear.build(linear.Config(start=1.0, end=0.1, steps=100), 3, 0, 3)
    assert explorer.arms(0).epsilon.tolist() == [1.0] * 3
    assert explorer.arms(50).epsilon.tolist() == pytest.approx([0.55] * 3)
    assert explorer.arms(2**40).epsilon.tolist() == pytest.approx([0.1] * 3)


def test_ladder_is_the_papers():
    explorer = ladder.build(ladder.Config(), 8, 0, 8)
    assert torch.allclose(explorer.arms(0).epsilon, torch.tensor([0.4 ** (1 + 7 * i / 7) for i in range(8)]))


def test_ladder_spans_all_lanes_of_the_run():
    parts = [ladder.build(ladder.Config(), 4, first, 8).arms(0).epsilon for first in (0, 4)]
    assert torch.equal(torch.cat(parts), ladder.build(ladder.Config(), 8, 0, 8).arms(0).epsilon)
    assert torch.equal(ladder.build(ladder.Config(), 4, 8, 8).arms(0).epsilon, parts[0])


def test_ladder_comes_down_from_random_play():
    explorer = ladder.build(ladder.Config(warmup_steps=100), 2, 0, 2)
    assert explorer.arms(0).epsilon.tolist() == [1.0, 1.0]
    assert explorer.arms(50).epsilon[0].item() == pytest.approx(0.7)
    assert explorer.arms(100).epsilon[0].item() == pytest.approx(0.4)


def test_one_lane_has_the_first_rung():
    assert ladder.build(ladder.Config(), 1, 0, 1).arms(0).epsilon.tolist() == pytest.approx([0.4])


def test_constant():
    assert constant.build(constant.Config(epsilon=0.25), 2, 0, 2).arms(7).epsilon.tolist() == [0.25, 0.25]
