"""Projection, quantile loss and cosines: hand tables, naive float64 loops under random inputs, gradients included."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qfleet.maths.bellman import gather_actions, scaled_log_policy
from qfleet.maths.distributional import (
    categorical_projection,
    cosine_features,
    cross_entropy,
    entropy,
    gaussian_histogram,
    midpoints,
    pairwise_td_errors,
    quantile_huber,
)

STEP = 1e-6
NEAR = 1e-4
"""Half the width of a central difference, and how near to a kink it would lie."""


def doubles(*values):
    return torch.tensor(values, dtype=torch.float64)


def slopes(naive, row):
    """Central differences of a naive loop (a list of floats -> a number) in each of its inputs."""
    def moved(i, by):
        return naive([*row[:i], row[i] + by, *row[i + 1:]])

    return [(moved(i, STEP) - moved(i, -STEP)) / (2 * STEP) for i in range(len(row))]


@pytest.mark.parametrize(("value", "expected"), [
    (0.0, [1, 0, 0]), (1.0, [0, 1, 0]), (0.25, [0.75, 0.25, 0]), (1.5, [0, 0.75, 0.25]), (2.5, [0, 0.25, 0.75]),
    (3.0, [0, 0, 1]), (-7.0, [1, 0, 0]), (99.0, [0, 0, 1])])
def test_one_mass_by_hand_on_an_uneven_support(value, expected):
    support = doubles(0, 1, 3)
    found = categorical_projection(doubles(value)[None], doubles(1.0)[None], support)
    assert found[0].tolist() == pytest.approx(expected)


@pytest.mark.parametrize(("mean", "masses"), [
    (1.5, [0.15731, 0.68269, 0.15731]),  # Φ(−1) − Φ(−3), Φ(1) − Φ(−1), Φ(3) − Φ(1)
    (1.0, [0.47725, 0.47725, 0.02272]),  # Φ(0) − Φ(−2), Φ(2) − Φ(0), Φ(4) − Φ(2)
    (0.0, [0.47725, 0.02272, 0.00003]), (-9.0, [0.47725, 0.02272, 0.00003]),  # clipped to the lower end
    (3.0, [0.00003, 0.02272, 0.47725]), (50.0, [0.00003, 0.02272, 0.47725])])
def test_a_histogram_by_the_table_of_the_normal_distribution(mean, masses):
    """Three bins of width 1 = 2σ, so that all bounds are whole numbers of σ from the mean."""
    found = gaussian_histogram(doubles(mean), doubles(0, 1, 2, 3), 0.5)
    assert found[0].tolist() == pytest.approx([mass / sum(masses) for mass in masses], abs=2e-5)


@given(st.integers(0, 10_000), st.integers(1, 9), st.floats(0.05, 3))
def test_a_histogram_equals_a_naive_loop(seed, bins, sigma):
    """Bins of any widths; what lies outside is clipped."""
    rng = torch.Generator().manual_seed(seed)
    edges = torch.randn(1, generator=rng).double() + torch.rand(bins + 1, generator=rng).double().add(0.05).cumsum(0)
    means = 4 * torch.randn(5, generator=rng).double()
    found = gaussian_histogram(means, edges, sigma)
    for mean, row in zip(means.tolist(), found.tolist(), strict=True):
        clipped = min(max(mean, edges[0].item()), edges[-1].item())
        cdf = [0.5 * math.erfc((clipped - edge) / sigma / math.sqrt(2)) for edge in edges.tolist()]
        assert row == pytest.approx([(b - a) / (cdf[-1] - cdf[0]) for a, b in itertools.pairwise(cdf)], abs=1e-9)
        assert sum(row) == pytest.approx(1)


def test_a_histogram_keeps_its_mean_far_from_the_ends_and_narrows_to_one_bin():
    edges = torch.linspace(-10, 10, 52)
    width, centres, means = 20 / 51, (edges[:-1] + edges[1:]) / 2, torch.linspace(-7, 7, 30)
    assert torch.allclose(gaussian_histogram(means, edges, 0.75 * width) @ centres, means, atol=2e-3)
    assert gaussian_histogram(centres, edges, 0.01 * width).equal(torch.eye(51))


def test_the_papers_step_by_hand():
    """r = 1, γ = 0.5 on the support -1, 0, 1, 2: atoms go to 0.5, 1, 1.5, 2."""
    support, probs = doubles(-1, 0, 1, 2), doubles(0.1, 0.2, 0.3, 0.4)
    found = categorical_projection((1 + 0.5 * support)[None], probs[None], support)
    assert found[0].tolist() == pytest.approx([0, 0.05, 0.05 + 0.2 + 0.15, 0.15 + 0.4])


def naive_projection(values, probs, support):
    out = [0.0] * len(support)
    for value, prob in zip(values, probs, strict=True):
        value = min(max(value, support[0]), support[-1])
        upper = next(i for i, z in enumerate(support) if z >= value)
        if support[upper] == value:
            out[upper] += prob
            continue
        part = (value - support[upper - 1]) / (support[upper] - support[upper - 1])
        out[upper] += prob * part
        out[upper - 1] += prob * (1 - part)
    return out


@given(st.integers(0, 10_000), st.integers(2, 9), st.integers(1, 12))
def test_projection_equals_a_naive_loop(seed, atoms, masses):
    """Supports of any distances, and a discount of its own for every item."""
    rng = torch.Generator().manual_seed(seed)
    support = torch.randn(1, generator=rng).double() + torch.rand(atoms, generator=rng).double().add(0.05).cumsum(0)
    probs = torch.rand(5, masses, generator=rng).double()
    probs /= probs.sum(1, keepdim=True)
    discount = torch.rand(5, 1, generator=rng).double()
    reward, atoms = 2 * torch.randn(5, 1, generator=rng).double(), 3 * torch.randn(5, masses, generator=rng).double()
    values = reward + discount * atoms
    found = categorical_projection(values, probs, support)
    for item in range(5):
        expected = naive_projection(values[item].tolist(), probs[item].tolist(), support.tolist())
        assert found[item].tolist() == pytest.approx(expected, abs=1e-12)
    assert found.sum(1).tolist() == pytest.approx([1.0] * 5)
    inside = ((values >= support[0]) & (values <= support[-1])).all(1)
    assert torch.allclose((found @ support)[inside], (values * probs).sum(1)[inside]), "means are kept"


@given(st.integers(0, 10_000), st.integers(2, 7), st.integers(1, 6))
def test_gradients_of_the_projection_equal_differences_of_the_naive_loop(seed, atoms, masses):
    """In probabilities and in values, pulled in a random direction; values near an atom have no slope to compare."""
    rng = torch.Generator().manual_seed(seed)
    support = torch.rand(atoms, generator=rng).double().add(0.05).cumsum(0) - 1
    values = torch.randn(3, masses, generator=rng).double().requires_grad_()
    probs = torch.rand(3, masses, generator=rng).double().requires_grad_()
    pull = torch.randn(3, atoms, generator=rng).double()
    found = torch.autograd.grad(categorical_projection(values, probs, support), (values, probs), pull)
    for item in range(3):
        v, p, direction = values[item].tolist(), probs[item].tolist(), pull[item].tolist()

        def pulled(v, p, direction=direction):
            return sum(d * m for d, m in zip(direction, naive_projection(v, p, support.tolist()), strict=True))

        assert found[1][item].tolist() == pytest.approx(slopes(lambda p, v=v: pulled(v, p), p), abs=1e-6)
        smooth = (values[item, :, None] - support).abs().min(1).values > NEAR
        expected = doubles(*slopes(lambda v, p=p: pulled(v, p), v))
        assert torch.allclose(found[0][item][smooth], expected[smooth], atol=1e-6)


def test_projection_onto_itself_is_the_identity():
    support = doubles(-2, -1, 0.5, 3)
    probs = torch.rand(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(categorical_projection(support.expand(3, 4), probs, support), probs)


@pytest.mark.parametrize(("function", "shapes", "why"), [
    (categorical_projection, [(2, 3), (2, 4), (3,)], "alike"), (categorical_projection, [(3,), (3,), (3,)], "alike"),
    (categorical_projection, [(2, 3), (2, 3), (1,)], "support"),
    (categorical_projection, [(2, 3), (2, 3), (2, 3)], "support"),
    (cross_entropy, [(2, 3), (2, 4)], "alike"), (cross_entropy, [(2, 3), (1, 3)], "alike"),
    (cross_entropy, [(2, 3), (3,)], "alike"), (cross_entropy, [(3,), (3,)], "alike"),
    (cross_entropy, [(2, 4, 3), (2, 4, 3)], "alike"),
    (quantile_huber, [(2, 3), (3,), (4, 3)], "quantiles"), (quantile_huber, [(2, 3), (3,), (3,)], "quantiles"),
    (quantile_huber, [(2, 3), (4,), (2, 5)], "levels"), (quantile_huber, [(2, 3), (1,), (2, 5)], "levels"),
    (quantile_huber, [(2, 3), (1, 3), (2, 5)], "levels"), (quantile_huber, [(2, 3), (2, 5), (2, 5)], "levels"),
    (quantile_huber, [(2, 3, 4), (3, 4), (2, 5)], "quantiles"),
    (pairwise_td_errors, [(2, 3), (3, 3)], "quantiles"), (pairwise_td_errors, [(3,), (3,)], "quantiles")])
def test_shapes_are_checked(function, shapes, why):
    """What broadcasting would let pass in silence is refused as well."""
    rest = [1.0] if function is quantile_huber else []
    with pytest.raises(ValueError, match=why):
        function(*[torch.zeros(shape) for shape in shapes], *rest)


def test_divergence_by_hand():
    m = doubles(0.5, 0.5, 0.0)[None]
    logits = doubles(0.25, 0.5, 0.25).log()[None]
    assert cross_entropy(logits, m).item() == pytest.approx(0.5 * math.log(4) + 0.5 * math.log(2))
    assert entropy(m).item() == pytest.approx(math.log(2)), "0 log 0 is 0"
    assert (cross_entropy(m.clamp(min=1e-300).log(), m) - entropy(m)).item() == pytest.approx(0.0, abs=1e-12)


def test_quantile_loss_by_hand():
    """θ = (0, 2) at τ = (¼, ¾), y = (1, 4), κ = 1: the sum over θ of the mean over y."""
    theta, y, tau = doubles(0, 2)[None], doubles(1, 4)[None], midpoints(2).double()
    first = 0.25 * (0.5 + 3.5) / 2           # δ = 1 and 4: both above θ, weight τ
    second = (0.25 * 0.5 + 0.75 * 1.5) / 2   # δ = -1 (weight 1 - τ) and 2
    assert quantile_huber(theta, tau, y, 1.0).item() == pytest.approx(first + second)
    sharp = 0.25 * (1 + 4) / 2 + (0.25 * 1 + 0.75 * 2) / 2
    assert quantile_huber(theta, tau, y, 0.0).item() == pytest.approx(sharp)


def naive_quantile_huber(theta, tau, y, kappa):
    total = 0.0
    for t, level in zip(theta, tau, strict=True):
        for target in y:
            delta = target - t
            size = abs(delta)
            if kappa > 0:
                size = 0.5 * delta**2 / kappa if size <= kappa else size - 0.5 * kappa
            total += abs(level - (delta < 0)) * size / len(y)
    return total


@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(1, 6), st.sampled_from([0.0, 0.3, 1.0, 5.0]))
def test_quantile_loss_equals_a_naive_loop(seed, n, m, kappa):
    rng = torch.Generator().manual_seed(seed)
    theta, y = torch.randn(4, n, generator=rng).double(), 2 * torch.randn(4, m, generator=rng).double()
    tau = torch.rand(4, n, generator=rng).double()
    found = quantile_huber(theta, tau, y, kappa)
    shared = quantile_huber(theta, tau[0], y, kappa)
    for i in range(4):
        one, level, other = theta[i].tolist(), tau[i].tolist(), y[i].tolist()
        assert found[i].item() == pytest.approx(naive_quantile_huber(one, level, other, kappa), abs=1e-12)
        assert shared[i].item() == pytest.approx(naive_quantile_huber(one, tau[0].tolist(), other, kappa), abs=1e-12)


@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 5), st.sampled_from([0.0, 0.3, 1.0, 5.0]))
def test_gradients_of_the_quantile_loss_equal_differences_of_the_naive_loop(seed, n, m, kappa):
    """κ = 0 bends where θ meets y, which is left out; with κ > 0 the loss is smooth everywhere."""
    rng = torch.Generator().manual_seed(seed)
    theta, y = torch.randn(3, n, generator=rng).double().requires_grad_(), torch.randn(3, m, generator=rng).double()
    tau = torch.rand(3, n, generator=rng).double()
    (found,) = torch.autograd.grad(quantile_huber(theta, tau, y, kappa).sum(), theta)
    smooth = pairwise_td_errors(theta, y).abs().min(2).values > (0 if kappa else NEAR)
    for item in range(3):
        level, other = tau[item].tolist(), y[item].tolist()
        expected = doubles(*slopes(lambda x, t=level, y=other: naive_quantile_huber(x, t, y, kappa),
                                   theta[item].tolist()))
        assert torch.allclose(found[item][smooth[item]], expected[smooth[item]], atol=1e-5)


def naive_cross_entropy(logits, probs):
    total = sum(math.exp(x) for x in logits)
    return -sum(p * math.log(math.exp(x) / total) for x, p in zip(logits, probs, strict=True))


@given(st.integers(0, 10_000), st.integers(1, 8), st.sampled_from([0.1, 1.0, 5.0]))
def test_cross_entropy_and_its_gradient_equal_a_naive_loop(seed, atoms, scale):
    """Targets that do not add up to 1 as well: a gradient that supposes so would differ."""
    rng = torch.Generator().manual_seed(seed)
    logits = (scale * torch.randn(3, atoms, generator=rng).double()).requires_grad_()
    probs = torch.rand(3, atoms, generator=rng).double()
    found = cross_entropy(logits, probs)
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    for item in range(3):
        x, p = logits[item].tolist(), probs[item].tolist()
        assert found[item].item() == pytest.approx(naive_cross_entropy(x, p), abs=1e-10)
        expected = slopes(lambda x, p=p: naive_cross_entropy(x, p), x)
        assert gradient[item].tolist() == pytest.approx(expected, abs=1e-5)


def test_quantile_regression_finds_the_quantiles():
    rng = torch.Generator().manual_seed(0)
    y = torch.rand(1, 4001, generator=rng, dtype=torch.float64)
    theta, tau = torch.zeros(1, 4, dtype=torch.float64, requires_grad=True), midpoints(4).double()
    for _ in range(600):
        (grad,) = torch.autograd.grad(quantile_huber(theta, tau, y, 0.0), theta)
        theta.data -= 0.02 * grad
    assert torch.allclose(theta, torch.quantile(y, tau)[None], atol=0.02)
    assert midpoints(4).tolist() == [0.125, 0.375, 0.625, 0.875]


def test_cosines_by_hand():
    found = cosine_features(doubles(0.0, 0.5, 1.0)[None], 3)
    assert found.shape == (1, 3, 3)
    assert torch.allclose(found[0], doubles([1, 1, 1], [1, 0, -1], [1, -1, 1]), atol=1e-12)


@given(st.integers(0, 10_000), st.integers(1, 70))
def test_cosines_equal_a_naive_loop(seed, n):
    tau = torch.rand(2, 3, generator=torch.Generator().manual_seed(seed)).double()
    found = cosine_features(tau, n)
    assert found.shape == (2, 3, n) and found.dtype == torch.float64
    for b, j in itertools.product(range(2), range(3)):
        expected = [math.cos(math.pi * i * tau[b, j].item()) for i in range(n)]
        assert found[b, j].tolist() == pytest.approx(expected, abs=1e-12)


def test_the_soft_policy_by_hand():
    """τ log π of q = (0, τ log 3): π = (¼, ¾)."""
    tau = 0.5
    found = scaled_log_policy(doubles(0, tau * math.log(3))[None], tau)
    assert found[0].tolist() == pytest.approx([tau * math.log(0.25), tau * math.log(0.75)])
    assert scaled_log_policy(doubles(0, 1000.0)[None], 0.03).isfinite().all()


def test_pick_takes_laws_as_well():
    laws = torch.arange(12.0).reshape(2, 3, 2)
    assert gather_actions(laws, torch.tensor([2, 0])).tolist() == [[4, 5], [6, 7]]
