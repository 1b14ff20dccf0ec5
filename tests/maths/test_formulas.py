"""Rescaling and the pieces of the Bellman error."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from qfleet.maths.bellman import huber, pick, squared
from qfleet.maths.rescale import h, h_inverse


@given(st.lists(st.floats(-1e5, 1e5), min_size=1, max_size=20))
def test_rescaling_is_undone_by_its_inverse(values):
    x = torch.tensor(values, dtype=torch.float64)
    assert torch.allclose(h_inverse(h(x)), x, rtol=1e-6, atol=1e-6)


def test_rescaling_by_hand():
    assert h(torch.tensor([3.0, -3.0, 0.0])).tolist() == torch.tensor([1.003, -1.003, 0.0]).tolist()


def test_losses_by_hand():
    q, y = torch.tensor([0.0, 1.0, 4.0, -3.0]), torch.tensor([0.5, 1.0, 1.0, 1.0])
    assert huber(q, y).tolist() == [0.125, 0.0, 2.5, 3.5]
    assert huber(q, y, 2.0).tolist() == [0.125, 0.0, 4.0, 6.0]
    assert squared(q, y).tolist() == [0.25, 0.0, 9.0, 16.0]


def test_pick_takes_the_action_of_each_item():
    q = torch.arange(6.0).reshape(3, 2)
    assert pick(q, torch.tensor([1, 0, 1])).tolist() == [1.0, 2.0, 5.0]
