"""A captured update equals the eager one to the bit, and agents that cannot be captured run as they are."""

import dataclasses
import itertools
import logging
import threading

import pytest
import torch
from fakes import linear_agent, sample_of
from torch import nn

from qfleet.agent import Loss
from qfleet.algos import c51, iqn, qr
from qfleet.algos.dqn import Config, build
from qfleet.roles.derive import Captured, Eager
from qfleet.roles.flat import Flat
from qfleet.roles.gradients import OptimizerConfig, Solo
from qfleet.types import EnvSpec, Leaf, Sample

SPEC = EnvSpec("toy", {"obs": Leaf((3,), "float32", "vector")}, actions=4)


def batch(seed, rows=4, items=16):
    rng = torch.Generator().manual_seed(seed)
    last = torch.rand(items, rows, generator=rng) < 0.2
    return Sample(torch.arange(items).numpy(), torch.rand(items, generator=rng), {
        "obs.obs": torch.randn(items, rows, 3, generator=rng), "last": last,
        "action": torch.randint(4, (items, rows), generator=rng, dtype=torch.int32),
        "reward": torch.randn(items, rows, generator=rng) * ~last, "discount": 1.0 * ~last})


def train(captured, switches, precision=torch.float32):
    """Ten updates; the weights at the end."""
    agent = build(Config(hidden=(8, 8), n_step=3, **switches), SPEC)
    torch.manual_seed(0)
    flat, target = Flat(agent.network(), precision), Flat(agent.network().requires_grad_(False), precision)
    eager = Eager(agent, flat.net, target.net, torch.Generator())
    derive = Captured(eager) if captured else eager
    solo = Solo(OptimizerConfig(learning_rate=1e-2))
    solo.attach(flat)
    for seed in range(10):
        solo.apply(derive(batch(seed)).grads)
        target.follow(flat, 0.1)
    return flat.master, derive


SWITCHES = list(itertools.product([False, True], [False, True], ["huber", "mse"], [False, True]))


@pytest.mark.slow
@pytest.mark.parametrize("double,dueling,loss,rescale", SWITCHES)
def test_captured_equals_eager_to_the_bit(double, dueling, loss, rescale):
    switches = {"double": double, "dueling": dueling, "loss": loss, "rescale": rescale}
    eager, _ = train(False, switches)
    captured, derive = train(True, switches)
    assert derive._play is not derive.eager, "it was captured"
    assert torch.equal(eager, captured)


def test_captured_equals_eager_in_bfloat16():
    eager, _ = train(False, {}, torch.bfloat16)
    captured, _ = train(True, {}, torch.bfloat16)
    assert torch.equal(eager, captured)


@pytest.mark.parametrize("norm", ["layer", "group"])
def test_normed_images_are_captured_too(norm):
    spec = EnvSpec("toy", {"obs": Leaf((1, 8, 8), "uint8", "image")}, actions=4)
    agent = build(Config(hidden=(8,), norm=norm), spec)
    torch.manual_seed(0)
    flat, target = Flat(agent.network()), Flat(agent.network().requires_grad_(False))
    eager = Eager(agent, flat.net, target.net, torch.Generator())
    captured, solo = Captured(eager), Solo(OptimizerConfig(learning_rate=1e-2))
    solo.attach(flat)
    for seed in range(3):
        sample = batch(seed, rows=2)
        pixels = torch.randint(256, (16, 2, 1, 8, 8), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
        sample.rows["obs.obs"] = pixels
        one, other = eager(sample), captured(sample)
        assert captured._play is not captured.eager
        assert all(torch.equal(a, b) for a, b in zip(one.grads, other.grads, strict=True))
        solo.apply(other.grads)


def test_capturing_draws_nothing_and_moves_no_statistics():
    def loss(net, target, sample, rng):
        value = net(sample.rows["obs.obs"][:, 0]).sum(1) * torch.rand(2, generator=rng)
        return Loss(value, value.detach())

    agent = dataclasses.replace(linear_agent(loss), network=lambda: nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 3)))
    results = []
    for captured in (False, True):
        torch.manual_seed(0)
        flat = Flat(agent.network())
        eager = Eager(agent, flat.net, flat.net, torch.Generator().manual_seed(1))
        derive = Captured(eager) if captured else eager
        totals = [derive(sample_of([1.0, 2.0])).total.item() for _ in range(3)]
        results.append((totals, flat.state()["0.running_mean"].tolist(), eager.rng.get_state().tolist()))
    assert results[0] == results[1]


def test_a_first_batch_without_a_finite_loss_is_not_the_one_recorded():
    agent = linear_agent()
    flat = Flat(agent.network())
    captured = Captured(Eager(agent, flat.net, flat.net, torch.Generator()))
    captured(sample_of([1.0, float("nan")]))
    captured(sample_of([1.0, 2.0]))
    assert captured._play is not None and captured._play is not captured.eager


def test_metrics_and_priorities_come_along():
    agent = build(Config(hidden=(8,)), SPEC)
    flat, target = Flat(agent.network()), Flat(agent.network().requires_grad_(False))
    eager = Eager(agent, flat.net, target.net, torch.Generator())
    captured = Captured(eager)
    captured(batch(0, rows=2))
    one, other = eager(batch(1, rows=2)), captured(batch(1, rows=2))
    assert torch.equal(one.priority, other.priority) and one.metrics.keys() == other.metrics.keys()
    assert all(torch.equal(one.metrics[tag], other.metrics[tag]) for tag in one.metrics)


def test_another_batch_size_is_recorded_anew():
    agent = build(Config(hidden=(8,)), SPEC)
    flat, target = Flat(agent.network()), Flat(agent.network().requires_grad_(False))
    captured = Captured(Eager(agent, flat.net, target.net, torch.Generator()))
    captured(batch(0, rows=2, items=8))
    assert captured(batch(0, rows=2, items=5)).priority.shape == (5,)


@pytest.mark.parametrize("nature", ["random", "branching"])
def test_what_cannot_be_repeated_runs_as_it_is_and_says_so(nature, caplog):
    def loss(net, target, sample, rng):
        value = net(sample.rows["obs.obs"][:, 0]).sum(1)
        if nature == "branching":
            value = value if float(value.sum()) > 1e9 else value * 2
        else:
            value = value * torch.rand(len(value))  # not the generator's that was passed in
        return Loss(value, value.detach())

    agent = linear_agent(loss)
    flat = Flat(agent.network())
    captured = Captured(Eager(agent, flat.net, flat.net, torch.Generator().manual_seed(1)))
    with caplog.at_level(logging.WARNING):
        captured(sample_of([1.0, 2.0]))
    assert "learner.capture" in caplog.text
    assert captured._play is captured.eager


@pytest.mark.slow
@pytest.mark.parametrize("algo", [c51, qr, iqn])
def test_what_draws_from_the_given_generator_is_recorded_with_it(algo, caplog):
    """Recorded and plain updates take the same numbers from the generator, in the same order."""
    results = []
    for kind in (Eager, lambda *parts: Captured(Eager(*parts))):
        agent = algo.build(algo.Config(hidden=(8,), noisy=True, dueling=True, munchausen=True), SPEC)
        torch.manual_seed(0)
        flat, target = Flat(agent.network()), Flat(agent.network().requires_grad_(False))
        rng = torch.Generator().manual_seed(1)
        derive = kind(agent, flat.net, target.net, rng)
        totals = [derive(batch(seed, rows=2)).total.item() for seed in range(3)]
        results.append((totals, rng.get_state().tolist()))
    assert results[0] == results[1] and not caplog.text


def test_learners_in_threads_record_one_after_the_other(caplog):
    """The tracer changes torch's modules for all threads while it traces: two at once would spoil each other."""
    call, found = nn.Module.__call__, []
    threads = [threading.Thread(target=lambda: found.append(train(True, {}))) for _ in range(6)]
    with caplog.at_level(logging.WARNING):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert caplog.text == "" and nn.Module.__call__ is call, "and torch is as it was"
    assert len(found) == 6 and all(derive._play is not derive.eager for _, derive in found)
