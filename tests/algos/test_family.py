"""Every member under every mix of switches equals a naive loop over transitions, written from the papers' formulas."""

import itertools
import math

import pytest
import torch
from family_kit import ALGOS, agent, batch_of, config, twins

from qfleet.maths.value_rescaling import EPSILON
from qfleet.networks.noisy import Noise

SWITCHES = [dict(zip(("n_step", "double", "munchausen", "dueling", "noisy", "rescale"), row, strict=True))
            for row in itertools.product([1, 3], [False, True], [False, True], [False, True], [False, True],
                                         [False, True])
            if not (row[1] and row[2])]


ITEMS = 8


def overheard(algo, net, target, batch, made, seed=5):
    """The loss, and what the networks answered on the way to it: (network, levels or None, answer) in order."""
    calls = []

    def listen(module, args, out):
        tau = args[1].tolist() if algo == "iqn" else None
        calls.append((module, tau, out.detach().double().tolist()))

    handles = [module.register_forward_hook(listen) for module in (net, target)]
    found = made.loss(net, target, batch, torch.Generator().manual_seed(seed))
    for handle in handles:
        handle.remove()
    return found, calls


class Oracle:
    """One transition at a time, in plain floats."""

    def __init__(self, algo, cfg):
        self.algo, self.cfg = algo, cfg
        if algo == "c51":
            self.z = [cfg.v_min + i * (cfg.v_max - cfg.v_min) / (cfg.atoms - 1) for i in range(cfg.atoms)]
        if algo == "hlgauss":
            self.width = (cfg.v_max - cfg.v_min) / cfg.atoms
            self.z = [cfg.v_min + (i + 0.5) * self.width for i in range(cfg.atoms)]

    def real(self, x):
        if not self.cfg.rescale:
            return x
        root = (math.sqrt(1 + 4 * EPSILON * (abs(x) + 1 + EPSILON)) - 1) / (2 * EPSILON)
        return math.copysign(root**2 - 1, x)

    def learnt(self, x):
        return math.copysign(math.sqrt(abs(x) + 1) - 1, x) + EPSILON * x if self.cfg.rescale else x

    def q(self, law):
        """The mean of a law: logits of atoms, quantiles, or a number."""
        if self.algo == "dqn":
            return self.real(law)
        if self.algo == "hlgauss":
            return self.real(self.mean(law))
        if self.algo == "c51":
            return sum(p * self.real(z) for p, z in zip(softmax(law), self.z, strict=True))
        return sum(self.real(x) for x in law) / len(law)

    def mean(self, law):
        """The mean of a histogram, as learnt."""
        return sum(p * z for p, z in zip(softmax(law), self.z, strict=True))

    def target(self, ret, scale, bonus, laws, q_next):
        """(values, probabilities) of the target; each of equal probability if those are None."""
        cfg, ret = self.cfg, ret + bonus
        policy = [0.0] * len(laws)
        entropy = [0.0] * len(laws)
        if cfg.munchausen:
            policy = softmax([q / cfg.munchausen_temperature for q in q_next])
            entropy = [-cfg.munchausen_temperature * math.log(max(p, 1e-300)) for p in policy]
        else:
            policy[q_next.index(max(q_next))] = 1.0
        if self.algo == "c51":
            pairs = [(self.learnt(ret + scale * (self.real(z) + entropy[a])), policy[a] * p)
                     for a, law in enumerate(laws) for p, z in zip(softmax(law), self.z, strict=True)]
            return [v for v, _ in pairs], [p for _, p in pairs]
        laws = [self.mean(law) for law in laws] if self.algo == "hlgauss" else laws
        rows = [[law] for law in laws] if self.algo in ("dqn", "hlgauss") else laws
        means = [sum(policy[a] * (self.real(row[j]) + entropy[a]) for a, row in enumerate(rows))
                 for j in range(len(rows[0]))]
        return [self.learnt(ret + scale * x) for x in means], None

    def compare(self, law, tau, values, probs):
        """Loss and priority of one transition."""
        if self.algo == "dqn":
            td = abs(values[0] - law)
            return (0.5 * td**2 if td <= 1 else td - 0.5), td
        if self.algo == "hlgauss":
            y = min(max(values[0], self.cfg.v_min), self.cfg.v_max)
            m = self.histogram(y, self.cfg.sigma_ratio * self.width)
            return -sum(a * math.log(b) for a, b in zip(m, softmax(law), strict=True)), abs(y - self.mean(law))
        if self.algo == "c51":
            m = self.project(values, probs)
            logs = [math.log(p) for p in softmax(law)]
            cross = -sum(a * b for a, b in zip(m, logs, strict=True))
            return cross, cross + sum(p * math.log(p) for p in m if p > 0)
        tau = tau or [(i + 0.5) / len(law) for i in range(len(law))]
        loss = size = 0.0
        for theta, level in zip(law, tau, strict=True):
            for y in values:
                delta = y - theta
                bent = 0.5 * delta**2 if abs(delta) <= 1 else abs(delta) - 0.5
                loss += abs(level - (delta < 0)) * bent / len(values)
                size += abs(delta) / len(values) / len(law)
        return loss, size

    def histogram(self, y, sigma):
        """The mass of a Gaussian in each bin, by the error function, and rescaled to 1."""
        below = [0.5 * (1 + math.erf((z - self.width / 2 - y) / sigma / math.sqrt(2))) for z in self.z]
        below.append(0.5 * (1 + math.erf((self.cfg.v_max - y) / sigma / math.sqrt(2))))
        return [(b - a) / (below[-1] - below[0]) for a, b in itertools.pairwise(below)]

    def project(self, values, probs):
        m, gap = [0.0] * len(self.z), self.z[1] - self.z[0]
        for value, prob in zip(values, probs, strict=True):
            place = (min(max(value, self.z[0]), self.z[-1]) - self.z[0]) / gap
            low = min(int(place), len(self.z) - 2)
            m[low] += prob * (low + 1 - place)
            m[low + 1] += prob * (place - low)
        return m


def softmax(xs):
    top = max(xs)
    powers = [math.exp(x - top) for x in xs]
    return [p / sum(powers) for p in powers]


def walk(cfg, batch, item):
    row, scale, ret = 0, 1.0, 0.0
    while row < cfg.n_step and not batch.rows["last"][item, row]:
        ret += scale * batch.rows["reward"][item, row].item()
        scale *= cfg.gamma * batch.rows["discount"][item, row].item()
        row += 1
    return ret, scale


@pytest.mark.parametrize("algo", ALGOS)
def test_loss_and_priority_equal_a_naive_loop(algo):
    for switches in SWITCHES:
        cfg, made = config(algo, **switches), agent(algo, **switches)
        net, target = twins(made)
        batch = batch_of(cfg.n_step + 1, ITEMS)
        found, calls = overheard(algo, net, target, batch, made)
        oracle = Oracle(algo, cfg)
        (one, tau, here), (two, _, there), *more = calls
        assert (one, two) == (net, target)
        assert [module for module, _, _ in more] == ([target] if cfg.munchausen else [net] if cfg.double else [])
        split = cfg.target_samples if algo == "iqn" else None
        for item in range(ITEMS):
            ret, scale = walk(cfg, batch, item)
            action = batch.rows["action"][item, 0].item()
            laws = there[item] if split is None else [law[:split] for law in there[item]]
            choosing = more[0][2][item] if cfg.double else there[item]
            if split is not None and not cfg.double:
                choosing = [law[:cfg.policy_samples] for law in there[item]]
            bonus = 0.0
            if cfg.munchausen:
                q_now = [oracle.q(law) / cfg.munchausen_temperature for law in more[0][2][item]]
                log_pi = cfg.munchausen_temperature * math.log(max(softmax(q_now)[action], 1e-300))
                bonus = cfg.munchausen_alpha * max(log_pi, cfg.munchausen_floor)
            values, probs = oracle.target(ret, scale, bonus, laws, [oracle.q(law) for law in choosing])
            loss, priority = oracle.compare(here[item][action], tau and tau[item], values, probs)
            assert found.per_item[item].item() == pytest.approx(loss, abs=1e-4), switches
            assert found.priority[item].item() == pytest.approx(priority, abs=1e-4), switches


@pytest.mark.parametrize("algo", ALGOS)
def test_gradients_reach_the_online_network_alone(algo):
    made = agent(algo, noisy=True, dueling=True)
    net, target = twins(made)
    found = made.loss(net, target, batch_of(2), torch.Generator().manual_seed(0))
    assert not found.priority.requires_grad
    found.per_item.mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())
    assert all(p.grad is None for p in target.parameters())


@pytest.mark.parametrize("algo", ALGOS)
def test_randomness_is_the_generators(algo):
    made = agent(algo, noisy=True)
    net, target = twins(made)
    one, same, other = (made.loss(net, target, batch_of(2), torch.Generator().manual_seed(seed)).per_item
                        for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.allclose(one, other)


def test_no_two_passes_share_noise(monkeypatch):
    """Neither online and target network, nor two passes of one of them, nor two updates."""
    drawn = []
    real = Noise.draw
    monkeypatch.setattr(Noise, "draw", lambda self, size, x: drawn.append(real(self, size, x)) or drawn[-1])
    made = agent("dqn", noisy=True)
    net, target = twins(made)
    rng = torch.Generator().manual_seed(0)
    for _ in range(2):
        made.loss(net, target, batch_of(2), rng)
    assert len(drawn) == 2 * 3 * 4, "two updates of three passes, with two layers of two draws each"
    seen = [tuple(draw.flatten().tolist()) for draw in drawn if draw.shape[-1] == 8]
    assert len(set(seen)) == len(seen)
