"""Schedules of exploration by hand-computed points."""

import pytest
import torch

from qfleet.explore import constant, gaussian, ladder, linear, ou


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


@pytest.mark.parametrize(("module", "theta"), [(gaussian, 1.0), (ou, 0.15)])
def test_noise_has_a_size_for_every_lane_of_the_run(module, theta):
    cfg = module.Config(sigma=0.1, sigma_last=0.4, warmup_steps=100)
    whole = module.build(cfg, 4, 0, 4).arms(100)
    assert whole.sigma.tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4]) and whole.theta == theta
    parts = [module.build(cfg, 2, first, 4).arms(100).sigma for first in (0, 2)]
    assert torch.equal(torch.cat(parts), whole.sigma)
    assert module.build(module.Config(sigma=0.3), 2, 0, 2).arms(0).sigma.tolist() == pytest.approx([0.3] * 2)


def test_warm_up_is_random_and_what_follows_is_not():
    explorer = gaussian.build(gaussian.Config(warmup_steps=100), 2, 0, 2)
    assert explorer.arms(99).epsilon.tolist() == [1, 1] and explorer.arms(100).epsilon.tolist() == [0, 0]
