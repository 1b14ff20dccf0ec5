"""Rescaling and the pieces of the Bellman error."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qfleet.maths.bellman import gather_actions, huber, squared
from qfleet.maths.value_rescaling import h, h_inverse


@given(st.lists(st.floats(-1e5, 1e5), min_size=1, max_size=20))
def test_rescaling_is_undone_by_its_inverse(values):
    x = torch.tensor(values, dtype=torch.float64)
    assert torch.allclose(h_inverse(h(x)), x, rtol=1e-12, atol=1e-300)


@pytest.mark.parametrize("function", [h, h_inverse])
def test_rescaling_in_float32_loses_no_digits_near_zero(function):
    """The relative error is a few roundings for every size of value, so the sign is right, too."""
    sizes = torch.logspace(-8, 4, 20_001, dtype=torch.float32)
    x = torch.cat([sizes, -sizes, torch.zeros(1)])
    wanted, found = function(x.double()), function(x)
    assert torch.equal(found.sign(), x.sign())
    assert torch.all((found - wanted).abs() <= 1e-6 * wanted.abs())


def test_the_inverse_of_rescaling_is_the_root_of_its_equation():
    """By bisection of h, written as in the paper."""
    for y in (1e-3, 0.5, 7.0, 300.0, -20.0):
        low, high = 0.0, 1e6
        for _ in range(200):
            middle = (low + high) / 2
            if (middle + 1) ** 0.5 - 1 + 1e-3 * middle < abs(y):
                low = middle
            else:
                high = middle
        assert abs(float(h_inverse(torch.tensor(y, dtype=torch.float64)))) == pytest.approx(low, rel=1e-9)


def test_rescaling_by_hand():
    assert h(torch.tensor([3.0, -3.0, 0.0])).tolist() == torch.tensor([1.003, -1.003, 0.0]).tolist()


def test_losses_by_hand():
    q, y = torch.tensor([0.0, 1.0, 4.0, -3.0]), torch.tensor([0.5, 1.0, 1.0, 1.0])
    assert huber(q, y).tolist() == [0.125, 0.0, 2.5, 3.5]
    assert huber(q, y, 2.0).tolist() == [0.125, 0.0, 4.0, 6.0]
    assert squared(q, y).tolist() == [0.25, 0.0, 9.0, 16.0]


def test_pick_takes_the_action_of_each_item():
    q = torch.arange(6.0).reshape(3, 2)
    assert gather_actions(q, torch.tensor([1, 0, 1])).tolist() == [1.0, 2.0, 5.0]
