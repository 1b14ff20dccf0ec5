"""Delay compensation on quadratics, where the true gradient is known."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qfleet.maths.delay_compensation import FLOOR, compensate


def errors(h, w_then, w_now, lam):
    """Of ½ Σ h w²: distance per coordinate of the plain and of the compensated gradient to the true one at w_now."""
    g, true = h * w_then, h * w_now
    return (g - true).abs(), (compensate(g, w_now, w_then, lam).gradient - true).abs()


@given(st.integers(0, 10_000))
def test_it_is_closer_exactly_where_theory_says(seed):
    rng = torch.Generator().manual_seed(seed)
    h = torch.rand(200, generator=rng, dtype=torch.float64) * 4 - 1  # also negative curvature
    w_then = torch.randn(200, generator=rng, dtype=torch.float64) * 2
    w_now = w_then + torch.randn(200, generator=rng, dtype=torch.float64)
    lam = 0.4
    estimate = lam * (h * w_then) ** 2
    plain, compensated = errors(h, w_then, w_now, lam)
    inside = (estimate > 1e-9) & (estimate < 2 * h * (1 - 1e-9))
    outside = (estimate > 2 * h * (1 + 1e-9)) & (estimate > 1e-9) | (h < -1e-9) & (estimate > 1e-9)
    assert inside.sum() > 20 and outside.sum() > 20
    assert (compensated < plain)[inside].all()
    assert (compensated > plain)[outside].all(), "outside it does harm, and nothing else is claimed"


def test_the_estimate_that_equals_the_curvature_is_exact():
    h, w_then = torch.tensor([2.0], dtype=torch.float64), torch.tensor([1.5], dtype=torch.float64)
    lam = float(1 / (h * w_then**2))
    plain, compensated = errors(h, w_then, torch.tensor([-1.0], dtype=torch.float64), lam)
    assert plain > 4 and compensated < 1e-12


@pytest.mark.parametrize("delay", [1, 4, 8])
def test_descent_with_injected_delay_goes_nearer_to_the_path_without(delay):
    """Every gradient is `delay` steps old. While all coordinates are in range, the compensated one is the better."""
    h = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    lam, rate = 0.05, 0.02
    path = [torch.tensor([2.0, -2.0, 1.0], dtype=torch.float64)] * (delay + 1)
    moved = 0
    for _ in range(60):
        then, now = path[-1 - delay], path[-1]
        g = h * then
        assert (lam * g * g < 2 * h).all(), "in range"
        compensated = compensate(g, now, then, lam).gradient
        changed = now != then
        assert ((compensated - h * now).abs() < (g - h * now).abs())[changed].all()
        moved += int(changed.sum())
        path.append(now - rate * compensated)
    assert moved > 100


def test_adaptive_lambda_by_hand():
    g, now, then = torch.tensor([2.0, -1.0]), torch.tensor([1.0, 1.0]), torch.tensor([0.5, 2.0])
    square = torch.tensor([1.0, 0.0])
    found = compensate(g, now, then, 0.3, square, decay=0.9)
    mean = [0.9 * 1.0 + 0.1 * 4.0, 0.1 * 1.0]
    expected = [2.0 + 0.3 / (mean[0] + FLOOR) ** 0.5 * 4.0 * 0.5, -1.0 + 0.3 / (mean[1] + FLOOR) ** 0.5 * 1.0 * -1.0]
    assert found.gradient.tolist() == pytest.approx(expected) and found.square.tolist() == pytest.approx(mean)


@pytest.mark.parametrize("adaptive", [False, True])
def test_without_delay_or_lambda_nothing_changes_bit_by_bit(adaptive):
    torch.manual_seed(0)
    g, now, then = torch.randn(1000), torch.randn(1000), torch.randn(1000)
    square = torch.rand(1000) if adaptive else None
    assert torch.equal(compensate(g, now, now, 0.4, square).gradient, g)
    assert torch.equal(compensate(g, now, then, 0.0, square).gradient, g)
