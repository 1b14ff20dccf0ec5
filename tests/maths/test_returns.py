"""n-step returns against hand-computed tables and a naive loop."""

import numpy as np
import pytest
import torch

from qfleet.maths.bellman import n_step


def naive(reward, discount, last, gamma, n, start):
    """Walk one stream, step by step, as the definition says."""
    ret, scale, row = 0.0, 1.0, start
    for _ in range(n):
        if last[row]:
            break
        ret += scale * reward[row]
        scale *= gamma * discount[row]
        row += 1
    return ret, scale, row


def tensors(reward, discount, last):
    return (torch.tensor([reward], dtype=torch.float64), torch.tensor([discount], dtype=torch.float64),
            torch.tensor([last]))


def test_three_steps_by_hand():
    step = n_step(*tensors([1, 2, 4, 8], [1, 1, 1, 1], [False] * 4), 0.5, 3)
    assert step.ret.tolist() == [[1 + 1 + 1]]
    assert step.discount.tolist() == [[0.125]]
    assert step.row.tolist() == [[3]]


def test_truncation_bootstraps_from_the_final_row():
    step = n_step(*tensors([1, 2, 0, 9], [1, 1, 0, 1], [False, False, True, False]), 0.5, 3)
    assert step.ret.tolist() == [[2.0]]
    assert step.discount.tolist() == [[0.25]]
    assert step.row.tolist() == [[2]]


def test_termination_silences_all_that_follows():
    step = n_step(*tensors([1, 2, 0, 9], [1, 0, 0, 1], [False, False, True, False]), 0.5, 3)
    assert step.ret.tolist() == [[2.0]]
    assert step.discount.tolist() == [[0.0]]


def test_a_lost_life_ends_the_return_but_not_the_stream():
    step = n_step(*tensors([1, 2, 4, 8], [1, 0, 1, 1], [False] * 4), 0.5, 3)
    assert step.ret.tolist() == [[2.0]]
    assert step.discount.tolist() == [[0.0]]


@pytest.mark.parametrize("n", [1, 2, 3, 5, 10])
def test_two_thousand_random_windows_equal_the_naive_loop(n):
    rng = np.random.default_rng(n)
    rows = n + 4
    reward = rng.normal(size=(500, rows))
    last = rng.random((500, rows)) < 0.15
    discount = np.where(rng.random((500, rows)) < 0.15, 0.0, 1.0)
    step = n_step(torch.from_numpy(reward), torch.from_numpy(discount), torch.from_numpy(last), 0.97, n)
    for item in range(500):
        for start in range(rows - n):
            expected = naive(reward[item], discount[item], last[item], 0.97, n, start)
            seen = (step.ret[item, start].item(), step.discount[item, start].item(), step.row[item, start].item())
            assert seen == pytest.approx(expected, abs=1e-12)


def test_gamma_may_differ_from_item_to_item():
    reward = torch.ones(2, 3, dtype=torch.float64)
    gamma = torch.tensor([[0.5], [0.9]], dtype=torch.float64)
    step = n_step(reward, reward, reward < 0, gamma, 2)
    assert step.ret[:, 0].tolist() == pytest.approx([1.5, 1.9])


def test_shapes_are_checked():
    with pytest.raises(ValueError, match="alike"):
        n_step(torch.ones(2, 3), torch.ones(2, 4), torch.zeros(2, 3, dtype=torch.bool), 0.9, 1)
    with pytest.raises(ValueError, match="3 rows hold no 3-step window"):
        n_step(torch.ones(2, 3), torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.bool), 0.9, 3)
