"""Parts of a network with rates of their own: as two optimizers would move them, the same wherever they are moved."""

from dataclasses import replace

import pytest
import torch
from fakes import ListMetrics
from shards import make_shards
from test_learner import learner_with
from thread_peers import Roundtable, ThreadRank

from qfleet.algos import d4pg, ddpg
from qfleet.core.agent import ParamGroup
from qfleet.core.env import Box, EnvSpec, Leaf
from qfleet.core.replay import Sample
from qfleet.optim.flat_params import Flat
from qfleet.optim.optimizer import (
    Optimizer,
    OptimizerConfig,
    ParamSlice,
    param_slices_of,
    slices_within,
    split_evenly,
)
from qfleet.sync.allreduce import AllReduce, RankLink
from qfleet.sync.gradient_sync import Solo
from qfleet.sync.ps_client import ParameterServerSync
from qfleet.sync.ps_shard import ParameterServerConfig

SPEC = EnvSpec("toy", {"obs": Leaf((3,), "float32", "vector")}, 0, box=Box((1,), (-2.0,), (2.0,)))
TD3 = ddpg.build(ddpg.Config(hidden=(24, 24), twin=True, smoothing=0.2, policy_delay=2, policy_rate=0.3), SPEC)
AGENTS = {"ddpg": ddpg.build(ddpg.Config(hidden=(24, 24)), SPEC), "td3": TD3,
          "d4pg": d4pg.build(d4pg.Config(hidden=(24, 24), n_step=1), SPEC)}


def batch(seed, items=8):
    rng = torch.Generator().manual_seed(seed)
    rows = {"obs.obs": torch.randn(items, 2, 3, generator=rng), "last": torch.zeros(items, 2, dtype=torch.bool),
            "action": 2 * torch.rand(items, 2, 1, generator=rng) - 1, "discount": torch.ones(items, 2),
            "reward": torch.randn(items, 2, generator=rng)}
    return Sample(torch.arange(items).numpy(), torch.rand(items, generator=rng), rows)


def test_parts_lie_where_their_parameters_do():
    flat = Flat(TD3.network(), groups=TD3.param_groups)
    marked = torch.zeros(len(flat.master))
    for part in flat.param_slices:
        marked[part.span] = 1
    expected = torch.cat([torch.full((p.numel(),), float(name.startswith("policy.")))
                          for name, p in flat.net.named_parameters()])
    assert torch.equal(marked, expected) and 0 < marked.sum() < len(marked)
    assert param_slices_of(flat.net, {}) == ()


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_a_part_moves_by_its_factor(optimizer):
    """Every rule's step is proportional to the rate, so two plain optimizers are the oracle."""
    torch.manual_seed(0)
    start, cfg = torch.randn(200), OptimizerConfig(optimizer=optimizer, learning_rate=0.1, clip_norm=0)
    both, slow, fast = start.clone(), start[:70].clone(), start[70:].clone()
    one = Optimizer(cfg, both, [ParamSlice(slice(0, 70), ParamGroup(0.2))])
    two = [Optimizer(cfg.model_copy(update={"learning_rate": 0.02}), slow), Optimizer(cfg, fast)]
    for _ in range(30):
        gradient = torch.randn(200)
        two[0].step(gradient[:70].clone(), 1.0)
        two[1].step(gradient[70:].clone(), 1.0)
        one.step(gradient, 1.0)
    torch.testing.assert_close(both, torch.cat([slow, fast]))


def test_a_part_rests_between_its_periods():
    torch.manual_seed(0)
    weights = torch.randn(10)
    one = Optimizer(OptimizerConfig(clip_norm=0), weights, [ParamSlice(slice(2, 6), ParamGroup(1.0, 3))])
    for step in range(1, 10):
        before, mean, square = weights.clone(), one.mean.clone(), one.square.clone()
        one.step(torch.randn(10), 1.0)
        moved = weights != before
        assert moved[2:6].any() == (step % 3 == 0) and moved[:2].all() and moved[6:].all()
        rests = step % 3 != 0
        assert torch.equal(one.mean[2:6], mean[2:6]) == rests and torch.equal(one.square[2:6], square[2:6]) == rests


@pytest.mark.parametrize("name", ["adam", "rmsprop"])
@pytest.mark.parametrize("pieces", [2, 3, 20])
def test_slices_move_as_the_whole_does(name, pieces):
    """Borders of parts lie anywhere, those of slices where kernels do not mind."""
    torch.manual_seed(0)
    cfg, size = OptimizerConfig(optimizer=name, learning_rate=0.1, clip_norm=1.0), 1003
    parts = (ParamSlice(slice(11, 333), ParamGroup(0.3)), ParamSlice(slice(333, 700), ParamGroup(2.0, 2)))
    whole = torch.randn(size)
    sliced, cuts = whole.clone(), split_evenly(size, pieces)
    one = Optimizer(cfg, whole, parts)
    many = [Optimizer(cfg, sliced[cut], slices_within(parts, cut)) for cut in cuts]
    for _ in range(20):
        gradient = torch.randn(size)
        norm, again = float(gradient.norm()), gradient.clone()
        for optimizer, cut in zip(many, cuts, strict=True):
            optimizer.step(again[cut], norm)
        one.step(gradient, norm)
    assert torch.equal(whole, sliced)


RATE = {"learning_rate": 0.01}


def fresh(agent, sync=None, **options):
    return learner_with([batch(seed) for seed in range(7)], agent, {"gradient_sync": sync}, target_period_updates=0,
                        target_tau=0.05, **RATE, **options)[0]


def trained(learner):
    learner.step()
    assert learner.updates == 7
    return learner


def ranks(agent, size, sharded):
    table = Roundtable(size)
    syncs = [AllReduce(OptimizerConfig(**RATE), RankLink(ThreadRank(table, rank)), sharded) for rank in range(size)]
    learners = [fresh(agent, sync) for sync in syncs]  # not in threads: what seeds them is torch's own
    return table.run(lambda peers: trained(learners[peers.rank]))


def served(agent, shards, **options):
    """Synchronisation with a server that holds the initial weights."""
    cfg, first = ParameterServerConfig(shards=shards), fresh(agent, **options)
    return ParameterServerSync(
        "one", make_shards(first.flat.master, first.cfg, cfg, first.flat.param_slices), cfg, ListMetrics())


@pytest.mark.parametrize("name", AGENTS)
def test_every_gradient_rule_alone_is_solo_to_the_bit(name):
    agent = AGENTS[name]
    solo = trained(fresh(agent))
    assert isinstance(solo.gradient_sync, Solo)
    others = [ranks(agent, 1, sharded)[0] for sharded in (False, True)]
    others += [trained(fresh(agent, served(agent, shards))) for shards in (1, 2, 5)]
    for other in others:
        assert torch.equal(solo.flat.master, other.flat.master) and torch.equal(solo.target.master, other.target.master)
        assert all(torch.equal(mine, its) for mine, its in
                   zip(solo.flat.net.buffers(), other.flat.net.buffers(), strict=True))


def test_ranks_with_a_sharded_optimizer_move_as_those_without():
    whole, parts = ranks(TD3, 2, False), ranks(TD3, 2, True)
    assert torch.equal(whole[0].flat.master, parts[0].flat.master)
    assert torch.equal(parts[0].flat.master, parts[1].flat.master)


@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_what_a_resting_policy_would_learn_is_not_computed_and_nothing_changes(factor):
    td3 = ddpg.build(ddpg.Config(hidden=(24, 24), twin=True, smoothing=0.2, policy_delay=3, policy_rate=factor), SPEC)
    lazy, always = (trained(fresh(agent, clip_norm=0))
                    for agent in (td3, replace(td3, loss_when_frozen=None)))
    assert torch.equal(lazy.flat.master, always.flat.master) and torch.equal(lazy.target.master, always.target.master)
    mine, its = lazy.state_dict(), always.state_dict()
    assert all(torch.equal(value, its["gradients"][name]) for name, value in mine["gradients"].items())
    assert torch.equal(mine["rng"], its["rng"])


def test_it_is_computed_where_somebody_needs_it():
    """Of seven updates the policy rests in four. A norm is that of all gradients; a server has a count of its own."""
    asked = []
    spied = replace(TD3, loss_when_frozen=lambda *parts: asked.append(1) or TD3.loss_when_frozen(*parts))
    trained(fresh(spied, clip_norm=0))
    assert len(asked) == 4
    trained(fresh(spied, clip_norm=10))
    trained(fresh(spied, served(spied, 2, clip_norm=0), clip_norm=0))
    assert len(asked) == 4
    ranks(spied, 1, True)
    assert len(asked) == 4, "clipped, by default"


def test_a_restored_optimizer_knows_whose_turn_it_is():
    whole = trained(fresh(TD3, clip_norm=0))
    first = fresh(TD3, clip_norm=0)
    first.max_updates_per_step = 3
    first.step()
    then = fresh(TD3, clip_norm=0)
    then.load_state_dict(first.state_dict())
    then.replay, first.max_updates_per_step = first.replay, None
    then.step()
    assert then.updates == 7 and torch.equal(whole.flat.master, then.flat.master)
