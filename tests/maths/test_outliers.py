"""The outlier guard: running mean and deviation of what was seen, and what is beyond them."""

import math

import pytest
import torch

from qfleet.maths.outliers import LossStatistics, inlier_mask


def test_by_hand():
    keep, spread = inlier_mask(torch.tensor([1.0, 3.0]), LossStatistics(), k=2)
    assert keep.all() and spread == LossStatistics(2.0, 1.0, 1)
    keep, spread = inlier_mask(torch.tensor([4.0, 4.0]), spread, k=2)
    assert keep.all(), "nothing is doubted at first"
    assert spread.mean == pytest.approx(2.2) and spread.batches == 2
    assert spread.variance == pytest.approx(0.9 * (1.0 + 0.1 * 4.0))


def test_what_is_too_far_above_is_dropped_and_a_monster_widens_the_spread_little():
    spread = LossStatistics(1.0, 0.25, 10)
    keep, after = inlier_mask(torch.tensor([0.9, 2.9, 3.1, -50.0, math.nan, math.inf]), spread, k=4)
    assert keep.tolist() == [True, True, False, True, False, False]
    _, same = inlier_mask(torch.tensor([0.9, 2.9, 3.1, -50.0]), spread, k=4)
    assert after == same, "what is not finite does not count"
    usual = torch.ones(32)
    usual[0] = 1e9
    keep, after = inlier_mask(usual, spread, k=4)
    assert keep.tolist() == [False] + [True] * 31
    assert after.variance < 1.25 * spread.variance and after.mean < 1.02
    _, same = inlier_mask(torch.tensor([4.5] + [1.0] * 31), spread, k=4)
    assert after == same, "it counts as one and a half times the limit, 1 + 4 * 0.5"


@pytest.mark.parametrize("every, least, most", [(20, 0.99, 1.0), (38, 0.3, 0.7), (100, 0.0, 0.01)])
def test_a_reward_is_believed_by_an_agent_that_expects_nothing_if_it_comes_often_enough(every, least, most):
    rng, spread, kept, seen = torch.Generator().manual_seed(0), LossStatistics(), 0, 0
    for batch in range(3000):
        loss = torch.rand(32, generator=rng) * 1e-8
        rewarded = torch.rand(32, generator=rng) < 1 / every
        keep, spread = inlier_mask(torch.where(rewarded, 0.5, loss), spread, k=6)
        if batch >= 500:
            kept, seen = kept + int((keep & rewarded).sum()), seen + int(rewarded.sum())
    assert least <= kept / seen <= most


def test_after_losses_of_zero_others_are_believed_again():
    spread, keep = LossStatistics(0.0, 0.0, 10), torch.zeros(1)
    for _ in range(3):
        keep, spread = inlier_mask(torch.tensor([0.5, 0.6, 0.4]), spread, k=6)
    assert keep.all()


def test_ordinary_losses_are_believed():
    rng, spread, dropped = torch.Generator().manual_seed(0), LossStatistics(), 0
    for _ in range(200):
        keep, spread = inlier_mask(torch.randn(64, generator=rng).abs(), spread, k=6)
        dropped += int((~keep).sum())
    assert dropped <= 1 and spread.mean == pytest.approx((2 / math.pi) ** 0.5, rel=0.1)
    assert spread.variance == pytest.approx(1 - 2 / math.pi, rel=0.2)
