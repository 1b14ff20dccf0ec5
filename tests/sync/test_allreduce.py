"""Averaged gradients: one rank is Solo, n ranks are one with n batches, and all do the same or nothing."""

import copy
import dataclasses
import math

import pytest
import torch
from fakes import TOY, sample_of, toy_batch
from test_learner import learner_with
from thread_peers import Roundtable, ThreadRank
from torch import nn

from qfleet.algos.dqn import Config, build
from qfleet.core.agent import Loss
from qfleet.core.compute import seeded_network
from qfleet.core.replay import Sample
from qfleet.learner.learner import Autograd
from qfleet.optim.flat_params import Flat
from qfleet.optim.optimizer import OptimizerConfig
from qfleet.sync.allreduce import AllReduce, RankLink
from qfleet.sync.gradient_sync import Solo
from qfleet.sync.overlap import OverlappedAllReduce

AGENT = build(Config(hidden=(8, 8), n_step=3), TOY)


def learners(size, samples, sharded=False, overlap=False, **cfg):
    """Learners in lock-step, rank by rank with their samples; those that are returned have made all they could."""
    table, optimizer = Roundtable(size), optimizer_of(**cfg)
    syncs = [AllReduce(optimizer, RankLink(ThreadRank(table, rank)), sharded, overlap) for rank in range(size)]
    made = [learner_with(list(samples[rank]), context={"gradient_sync": syncs[rank]}, **cfg)[:3]
            for rank in range(size)]  # torch's seed is not for threads

    def work(peers):
        learner, replay, metrics = made[peers.rank]
        learner.step()
        return learner, replay, metrics

    return table.run(work)


def rule_of(peers, *arguments, **more):
    return AllReduce(OptimizerConfig(), RankLink(peers, *arguments, **more))


def optimizer_of(**cfg):
    """The optimizer settings of `learner_with(**cfg)`."""
    given = {name: value for name, value in cfg.items() if name in OptimizerConfig.model_fields}
    return OptimizerConfig(**({"learning_rate": 0.1} | given))


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("sharded", [False, True])
def test_one_rank_is_solo(optimizer, precision, sharded):
    batches = [sample_of([i + 1.0, i - 2.0], weight=torch.tensor([1.0, 0.3])) for i in range(7)]
    cfg = {"optimizer": optimizer, "precision": precision, "target_period_updates": 2}
    solo, _, _, _ = learner_with(list(batches), **cfg)
    solo.step()
    [(learner, _, _)] = learners(1, [batches], sharded, **cfg)
    assert learner.updates == 7 and torch.equal(learner.flat.master, solo.flat.master)
    assert torch.equal(learner.target.master, solo.target.master)
    for name, value in solo.gradient_sync.state_dict().items():
        assert torch.equal(learner.gradient_sync.state_dict()[name], value)


def part(sample, rank, size, peak):
    """A share of a batch as a rank of its own would draw it: weights divided by the largest of the share."""
    items = len(sample.weight) // size
    cut = slice(rank * items, (rank + 1) * items)
    most = float(sample.weight[cut].max())
    rows = {name: value[cut] for name, value in sample.rows.items()}
    return Sample(sample.keys[cut], sample.weight[cut] / most, rows, peak * most)


def doubled_loss(net, target, sample, rng):
    """A one-step Q loss that keeps to float64; the package's own computes in float32."""
    q_BA, next_BA = net(sample.obs(0)), target(sample.obs(1))
    chosen = q_BA.gather(1, sample.rows["action"][:, :1].long()).squeeze(1)
    goal = sample.rows["reward"][:, 0] + 0.9 * sample.rows["discount"][:, 0] * next_BA.amax(1).detach()
    return Loss((chosen - goal) ** 2, (chosen - goal).detach().abs(), extra=1e-3 * (q_BA ** 2).mean())


class Mlp(nn.Sequential):
    def forward(self, obs):
        return super().forward(obs["obs"])


@pytest.mark.parametrize("size", [2, 4])
def test_the_mean_over_ranks_is_the_gradient_of_the_whole_batch(size):
    """In float64, importance weights included; every share is weighed by its own largest weight at first."""
    whole = toy_batch(3, items=16)
    rows = {name: rows.double() if rows.is_floating_point() else rows for name, rows in whole.rows.items()}
    weight = whole.weight.double() / whole.weight.double().max()
    whole = Sample(whole.keys, weight, rows, max_weight=7.0)
    cfg = OptimizerConfig(clip_norm=0)
    plain = dataclasses.replace(AGENT, loss=doubled_loss)
    torch.manual_seed(0)
    online, target = (Mlp(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4)).double() for _ in range(2))

    def derived(sample, gradients):
        net = copy.deepcopy(online)
        flat = Flat(net, torch.float64)
        gradients.attach(flat)
        factor = gradients.agree(sample.max_weight)
        found = Autograd(plain, net, target, torch.Generator())(
            Sample(sample.keys, sample.weight * factor, sample.rows))
        norm = gradients.apply(found.grads)
        return flat.grad.clone(), norm, flat.master.clone()

    expected, norm, moved = derived(whole, Solo(cfg))
    ranks = Roundtable(size).run(
        lambda peers: derived(part(whole, peers.rank, size, 7.0), AllReduce(cfg, RankLink(peers))))
    assert expected.abs().max() > 1e-3
    for gradient, its_norm, its in ranks:
        assert torch.allclose(gradient, expected, rtol=0, atol=1e-10) and its_norm == pytest.approx(norm, abs=1e-10)
        assert torch.equal(its, ranks[0][2]) and torch.allclose(its, moved, atol=1e-6)


class Partial(nn.Module):
    """Layers of which one takes no part, one comes in late, and one is used twice."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))

    def forward(self, x):
        for at in (0, 1, 4, 1, 3):
            x = torch.relu(self.layers[at](x)) + x
        return x


@pytest.mark.parametrize("least,any_early", [(1, True), (50, True), (100, False), (10_000, False)])
def test_gradients_that_leave_early_are_the_same(least, any_early):
    torch.manual_seed(0)
    net, batches = Partial().double(), torch.randn(2, 3, 8, 6, dtype=torch.float64)

    def work(peers):
        flat = Flat(copy.deepcopy(net), torch.float64)
        order = []

        def start_allreduce(vector):
            order.append(vector.storage_offset())
            return peers.start_allreduce(vector)

        early = OverlappedAllReduce(flat, start_allreduce, least)
        sums = []
        for rows in batches[peers.rank]:
            loss = flat.net(rows).square().mean()
            sent = len(order)
            grads = torch.autograd.grad(loss, flat.parameters, allow_unused=True)
            early_on = len(order) - sent
            sums.append(early.finish(grads).clone())
        return sums, order, early_on, len(early.buckets)

    ranks = Roundtable(2).run(work)
    for at in range(3):
        expected = 0.0
        for rank in range(2):
            flat = Flat(copy.deepcopy(net), torch.float64)
            loss = flat.net(batches[rank][at]).square().mean()
            expected = expected + flat.gather(torch.autograd.grad(loss, flat.parameters, allow_unused=True))
        assert all(torch.equal(sums[at], expected) for sums, _, _, _ in ranks)
    (_, order, early_on, parts), other = ranks[0], ranks[1]
    assert order == other[1] and order[:parts] == sorted(order[:parts], reverse=True) and len(set(order)) == parts
    assert (early_on > 0) == any_early, "parts of more than the two last layers wait for the one that took no part"


def test_a_gradient_that_comes_twice_is_refused():
    flat = Flat(nn.Linear(2, 2))
    OverlappedAllReduce(flat, lambda vector: lambda: None)
    torch.autograd.grad(flat.net(torch.ones(1, 2)).sum(), flat.parameters)
    with pytest.raises(RuntimeError, match="two gradients"):
        torch.autograd.grad(flat.net(torch.ones(1, 2)).sum(), flat.parameters)


@pytest.mark.parametrize("sharded", [False, True])
def test_ranks_update_together_or_not_at_all(sharded):
    """The shard of rank 1 runs dry after two updates: rank 0 waits with its third batch and hangs nobody."""
    many = [[sample_of([1.0, 2.0])] * 5, [sample_of([3.0, 1.0])] * 2]
    (a, replay, _), (b, _, _) = learners(2, many, sharded)
    assert a.updates == b.updates == 2 and torch.equal(a.flat.master, b.flat.master)
    assert replay.tape.count("sample") == 3 and replay.tape.count("update") == 2


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_on_one_rank_is_skipped_by_all(bad, overlap):
    good, broken = sample_of([1.0, 2.0]), sample_of([1.0, bad])
    ranks = learners(3, [[good, good], [broken, good], [good, good]], overlap=overlap)
    assert [learner.updates for learner, _, _ in ranks] == [1, 1, 1]
    assert all(metrics.counts == {"fault/bad_updates": 1} for _, _, metrics in ranks)
    assert all(torch.equal(learner.flat.master, ranks[0][0].flat.master) for learner, _, _ in ranks)
    assert all(len(replay.updates) == 1 for _, replay, _ in ranks), "no priorities of a batch that was not used"


def test_a_sharded_optimizer_moves_as_a_whole_one_and_its_state_fits_any_number():
    net = seeded_network(AGENT, 1)

    def trained(size, sharded, state=None):
        def work(peers):
            flat = Flat(copy.deepcopy(net))
            rule = AllReduce(OptimizerConfig(learning_rate=0.01), RankLink(peers), sharded)
            rule.attach(flat)
            if state is not None:
                rule.load_state_dict(state)
            for step in range(6):
                torch_rng = torch.Generator().manual_seed(step)
                rule.apply([torch.randn(p.shape, generator=torch_rng) for p in flat.parameters])
            return flat.master.clone(), rule.state_dict(), len(rule.optimizer.mean)

        return Roundtable(size).run(work)

    plain, sharded = trained(1, False)[0], trained(2, True)
    # A mean over two equal gradients is the gradient itself, bit by bit: x + x, halved.
    for master, state, kept in sharded:
        assert torch.equal(master, plain[0]) and kept < len(master)
        assert all(torch.equal(state[name], plain[1][name]) for name in state)
    again = trained(4, True, state=sharded[0][1])
    assert all(torch.equal(master, trained(1, False, plain[1])[0][0]) for master, _, _ in again[:1])


def test_the_weights_of_all_ranks_are_divided_by_the_largest_of_all():
    ranks = Roundtable(3).run(lambda peers: rule_of(peers).agree([2.0, 8.0, 4.0][peers.rank]))
    assert ranks == [0.25, 1.0, 0.5]
    ranks = Roundtable(2).run(lambda peers: rule_of(peers).agree([None, 1.0][peers.rank]))
    assert ranks == [None, None]


def test_a_vote_carries_what_ranks_tell_each_other():
    heard = [[], []]

    def work(peers):
        rule_of(peers, lambda: [peers.rank + 10.0], heard[peers.rank].append).agree(None)

    Roundtable(2).run(work)
    assert heard == [[[[10.0], [11.0]]]] * 2


def test_one_vote_decides_on_all_batches_that_everybody_has():
    """Five batches here, three there: one vote, three updates; the fourth batch is kept for the next round."""
    counts, gathers = [5, 3], []
    table, made = Roundtable(2), []

    def rank_of(index):
        peers = ThreadRank(table, index)
        gather = peers.all_gather
        peers.all_gather = lambda row: gathers.append(index) or gather(row)
        sync = AllReduce(optimizer_of(), RankLink(peers, batches_ahead=lambda: len(made[index][1].samples)))
        return learner_with([sample_of([1.0, 2.0])] * counts[index], context={"gradient_sync": sync})[:2]

    made += [rank_of(index) for index in range(2)]

    def work(peers):
        made[peers.rank][0].step()
        return made[peers.rank]

    (a, replay), (b, _) = table.run(work)
    assert a.updates == b.updates == 3 and sorted(gathers) == [0, 1]
    assert replay.tape.count("sample") == 4 and torch.equal(a.flat.master, b.flat.master)


def test_a_promise_that_is_not_kept_is_an_error():
    rule = rule_of(Roundtable(1).run(lambda peers: peers)[0], batches_ahead=lambda: 2)
    assert rule.agree(1.0) == 1.0
    with pytest.raises(RuntimeError, match="out of step"):
        rule.agree(None)
