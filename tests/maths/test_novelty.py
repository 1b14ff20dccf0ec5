"""Novelty against naive float64 loops, families of policies against the papers, Retrace against a recursion."""

import math

import numpy as np
import pytest
import torch

from qfleet.maths.bellman import n_step, retrace
from qfleet.maths.novelty import NoveltyKernel, episodic_bonus, modulator, running_mean
from qfleet.maths.policy_family import agent57_gammas, betas, gammas


def naive_bonus(memories, key, mean, kernel):
    """Badia et al. 2020a, algorithm 1, in doubles; the running mean is handed back with the bonus."""
    if not len(memories):
        return 0.0, mean
    distances = sorted(float(((key - memory) ** 2).sum()) for memory in memories)[:kernel.neighbours]
    n, value = mean
    value += (np.mean(distances) - value) * max(1 / (n + 1), 1e-3)
    total = 0.0
    for distance in distances:
        normal = max(distance / value - kernel.cluster, 0.0)
        total += kernel.epsilon / (normal + kernel.epsilon)
    s = math.sqrt(total) + kernel.constant
    return (1 / s if s <= kernel.similarity else 0.0), (n + 1, value)


PAPER = NoveltyKernel()


def bonuses(features, kernel=PAPER):
    """The bonus along an episode of one lane, by the tensor functions."""
    mean, found = torch.zeros((), dtype=torch.float64), []
    for t, key in enumerate(features):
        near = torch.full((1, kernel.neighbours), torch.inf, dtype=torch.float64)
        if t:
            apart = (features[:t] - key).square().sum(1).sort().values[:kernel.neighbours]
            near[0, :len(apart)] = apart
            mean = running_mean(mean, torch.tensor(t - 1.0), apart.mean(), 1000)
        found.append(float(episodic_bonus(near, mean.expand(1), kernel)))
    return found


@pytest.mark.parametrize("kernel", [PAPER, NoveltyKernel(3, 0.1, 0.01, 0.2, 1.2)])
def test_the_bonus_equals_a_naive_loop(kernel):
    features = np.random.default_rng(0).normal(size=(60, 5))
    features[30:40] = features[20]  # the same place again and again
    state, wanted = (0, 0.0), []
    for t, key in enumerate(features):
        bonus, state = naive_bonus(features[:t], key, state, kernel)
        wanted.append(bonus)
    np.testing.assert_allclose(bonuses(torch.from_numpy(features), kernel), wanted, rtol=1e-6)
    assert max(wanted[32:40]) < np.mean(wanted[1:20])


def test_the_bonus_is_not_a_constant():
    """A running mean that never begins would make every distance huge, and every bonus the same."""
    rng = torch.Generator().manual_seed(0)
    wild = bonuses(torch.randn(50, 4, generator=rng, dtype=torch.float64))
    still = bonuses(torch.cat([torch.randn(10, 4, generator=rng, dtype=torch.float64),
                               1e-4 * torch.randn(40, 4, generator=rng, dtype=torch.float64)]))
    assert np.mean(still[20:]) < 0.1 * np.mean(wild[20:])
    assert wild[0] == 0 and wild[1] > 0


def test_what_is_too_similar_is_worth_nothing():
    same = torch.zeros(2, 10)
    assert episodic_bonus(same, torch.ones(2), NoveltyKernel(similarity=3)).tolist() == [0, 0]
    wanted = [1 / (10**0.5 + 1e-3)] * 2
    assert episodic_bonus(same, torch.ones(2), NoveltyKernel(similarity=4)).tolist() == pytest.approx(wanted)


def test_a_running_mean_begins_with_its_first_value_and_follows_slowly():
    mean = torch.zeros(())
    for n, value in enumerate([4.0, 8.0, 3.0]):
        mean = running_mean(mean, torch.tensor(float(n)), torch.tensor(value), 1000)
    assert float(mean) == pytest.approx(5.0)
    assert float(running_mean(torch.tensor(1.0), torch.tensor(1e6), torch.tensor(2.0), 1000)) == pytest.approx(1.001)
    assert float(running_mean(torch.tensor(1.0), torch.tensor(1e6), torch.tensor(2.0), 50)) == pytest.approx(1.02)


def test_the_modulator_is_standardised_and_clipped():
    error = torch.tensor([0.0, 2.0, 3.0, 100.0])
    assert modulator(error, torch.tensor(2.0), torch.tensor(1.0), 5.0).tolist() == [1, 1, 2, 5]
    assert modulator(error[1:2], torch.tensor(2.0), torch.tensor(0.0), 5.0).tolist() == [1]


def test_families_equal_the_papers_formulas():
    n, beta = 32, 0.3
    found = betas(n, beta)
    assert found[0] == 0 and found[-1] == beta and sorted(found) == found
    for j in range(1, n - 1):
        assert found[j] == pytest.approx(beta / (1 + math.exp(-10 * (2 * j - 30) / 30)))
    discounts = gammas(n, 0.997, 0.99)
    assert discounts[0] == pytest.approx(0.997) and discounts[-1] == pytest.approx(0.99)
    for j in range(n):
        exponent = ((n - 1 - j) * math.log(1 - 0.997) + j * math.log(1 - 0.99)) / (n - 1)
        assert discounts[j] == pytest.approx(1 - math.exp(exponent))
    far = agent57_gammas(n, 0.9999, 0.997, 0.99)
    assert len(far) == n and far[0] == 0.9999 and far[7] == 0.997 and far[8] == pytest.approx(0.997)
    assert far[-1] == pytest.approx(0.99) and sorted(far, reverse=True) == far
    assert far[3] == pytest.approx((0.9999 + 0.997) / 2)
    assert betas(1, 0.3) == [0] and betas(2, 0.3) == [0, 0.3] and len(agent57_gammas(4, 0.9999, 0.997, 0.99)) == 4


def naive_retrace(q, greedy, rows, item, gamma, lam, t, epsilon):
    reward, discount = float(rows["reward"][item, t]), float(rows["discount"][item, t])
    policy = [epsilon / 3 + (1 - epsilon) * bool(action == greedy[item, t + 1]) for action in range(3)]
    value = sum(float(chance * q[item, t + 1, action]) for action, chance in enumerate(policy))
    target = reward + gamma * discount * value
    ends = t + 2 >= q.shape[1] or bool(rows["last"][item, t + 1])
    if not ends:
        taken = int(rows["action"][item, t + 1])
        ratio = min(1.0, float(policy[taken] / rows["mu"][item, t + 1]))
        beyond = naive_retrace(q, greedy, rows, item, gamma, lam, t + 1, epsilon)
        target += gamma * discount * lam * ratio * (beyond - float(q[item, t + 1, taken]))
    return target


def random_rows(items, length, rng):
    last = torch.rand(items, length, generator=rng) < 0.1
    return {"action": torch.randint(3, (items, length), generator=rng), "last": last,
            "reward": torch.randn(items, length, generator=rng, dtype=torch.float64) * ~last,
            "discount": (torch.rand(items, length, generator=rng) < 0.9).double() * ~last}


@pytest.mark.parametrize("epsilon", [0.0, 0.01, 0.3])
def test_retrace_equals_a_naive_recursion(epsilon):
    rng = torch.Generator().manual_seed(3)
    rows = random_rows(12, 8, rng)
    rows["mu"] = torch.rand(12, 8, generator=rng, dtype=torch.float64)
    q = torch.randn(12, 8, 3, generator=rng, dtype=torch.float64)
    greedy, gamma = q.argmax(2), torch.linspace(0.5, 0.99, 12, dtype=torch.float64).unsqueeze(1)
    found = retrace(q, greedy, rows, gamma, 0.9, epsilon)
    assert found.shape == (12, 7)
    for item in range(12):
        for t in range(7):
            if not rows["last"][item, t]:
                wanted = naive_retrace(q, greedy, rows, item, float(gamma[item]), 0.9, t, epsilon)
                assert float(found[item, t]) == pytest.approx(wanted, abs=1e-9)


def test_retrace_without_traces_is_one_step_and_with_all_of_them_the_whole_return():
    rng = torch.Generator().manual_seed(4)
    rows = random_rows(6, 5, rng) | {"last": torch.zeros(6, 5, dtype=torch.bool)}
    q = torch.randn(6, 5, 3, generator=rng, dtype=torch.float64)
    gamma = torch.full((6, 1), 0.9, dtype=torch.float64)
    own = rows["action"]
    value = q.gather(2, own.unsqueeze(2)).squeeze(2)
    for lam, n in ((0.0, 1), (1.0, 4)):
        step = n_step(rows["reward"], rows["discount"], rows["last"], gamma, n)
        wanted = step.ret[:, 0] + step.discount[:, 0] * value.gather(1, step.row[:, :1]).squeeze(1)
        torch.testing.assert_close(retrace(q, own, rows, gamma, lam)[:, 0], wanted)
