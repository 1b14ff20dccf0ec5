"""The outlier guard: running mean and deviation of what is believed."""

import math

import pytest
import torch

from qfleet.maths.outliers import Spread, believed


def test_by_hand():
    keep, spread = believed(torch.tensor([1.0, 3.0]), Spread(), k=2)
    assert keep.all() and spread == Spread(2.0, 1.0, 1)
    keep, spread = believed(torch.tensor([4.0, 4.0]), spread, k=2)
    assert keep.all(), "nothing is doubted at first"
    assert spread.mean == pytest.approx(2.2) and spread.batches == 2
    assert spread.variance == pytest.approx(0.9 * (1.0 + 0.1 * 4.0))


def test_what_is_too_far_above_is_dropped_and_does_not_move_the_mean():
    spread = Spread(1.0, 0.25, 10)
    keep, after = believed(torch.tensor([0.9, 2.9, 3.1, -50.0, math.nan, math.inf]), spread, k=4)
    assert keep.tolist() == [True, True, False, True, False, False]
    _, same = believed(torch.tensor([0.9, 2.9, -50.0]), spread, k=4)
    assert after == same
    keep, after = believed(torch.tensor([9.0]), spread, k=4)
    assert not keep.any() and after == spread


def test_ordinary_losses_are_believed():
    rng, spread, dropped = torch.Generator().manual_seed(0), Spread(), 0
    for _ in range(200):
        keep, spread = believed(torch.randn(64, generator=rng).abs(), spread, k=6)
        dropped += int((~keep).sum())
    assert dropped <= 1 and spread.mean == pytest.approx((2 / math.pi) ** 0.5, rel=0.1)
    assert spread.variance == pytest.approx(1 - 2 / math.pi, rel=0.2)
