"""The DQN loss against a naive per-transition loop, switch by switch, and its greedy behaviour."""

import itertools

import pytest
import torch

from qfleet.algos.dqn import Config, build
from qfleet.core.agent import ExplorationParams, epsilon_greedy
from qfleet.core.env import EnvSpec, Leaf
from qfleet.core.replay import Sample
from qfleet.maths.value_rescaling import h, h_inverse

SPEC = EnvSpec("toy", {"obs": Leaf((3,), "float32", "vector")}, num_actions=4)


def batch_of(rows: int, items: int = 16, seed: int = 0) -> Sample:
    rng = torch.Generator().manual_seed(seed)
    chance = torch.rand(items, rows, generator=rng)
    last = chance < 0.15
    last[:, 0] = False
    return Sample(
        keys=torch.arange(items).numpy(), weight=torch.ones(items),
        rows={"obs.obs": torch.randn(items, rows, 3, generator=rng),
              "action": torch.randint(4, (items, rows), generator=rng, dtype=torch.int32),
              "reward": torch.randn(items, rows, generator=rng) * ~last,
              "discount": (chance < 0.8).float() * ~last, "last": last})


def naive_target(cfg, net, target, batch, item):
    row, scale, ret = 0, 1.0, 0.0
    while row < cfg.n_step and not batch.rows["last"][item, row]:
        ret += scale * batch.rows["reward"][item, row].item()
        scale *= cfg.gamma * batch.rows["discount"][item, row].item()
        row += 1
    obs = {"obs": batch.rows["obs.obs"][item, row][None]}
    q = target(obs)[0]
    best = (net(obs)[0] if cfg.double else q).argmax()
    value = h_inverse(q[best]) if cfg.rescale else q[best]
    y = ret + scale * value
    return (h(y) if cfg.rescale else y).item()


SWITCHES = list(itertools.product([1, 3], [False, True], [False, True], ["huber", "mse"], [False, True]))


@pytest.mark.parametrize("n_step,double,dueling,loss,rescale", SWITCHES)
def test_loss_equals_a_naive_loop(n_step, double, dueling, loss, rescale):
    cfg = Config(n_step=n_step, double=double, dueling=dueling, loss=loss, rescale=rescale, hidden=(8,))
    agent = build(cfg, SPEC)
    torch.manual_seed(1)
    net, target = agent.network(), agent.network()
    batch = batch_of(n_step + 1)
    out = agent.loss(net, target, batch, torch.Generator())
    with torch.no_grad():
        for item in range(16):
            y = naive_target(cfg, net, target, batch, item)
            q = net({"obs": batch.rows["obs.obs"][item, 0][None]})[0, batch.rows["action"][item, 0]].item()
            td = abs(y - q)
            expected = td**2 if loss == "mse" else (0.5 * td**2 if td <= 1 else td - 0.5)
            assert out.per_item[item].item() == pytest.approx(expected, abs=1e-4)
            assert out.priority[item].item() == pytest.approx(td, abs=1e-4)


def test_the_target_network_gets_no_gradient():
    agent = build(Config(hidden=(8,)), SPEC)
    net, target = agent.network(), agent.network()
    agent.loss(net, target, batch_of(2), torch.Generator()).per_item.mean().backward()
    assert all(p.grad is None for p in target.parameters())
    assert all(p.grad is not None for p in net.parameters())


BASE = Config(hidden=(8,), n_step=3, huber_delta=0.5)


@pytest.mark.parametrize("change", [
    {"gamma": 0.5}, {"double": False}, {"dueling": True}, {"loss": "mse"}, {"huber_delta": 2.0}, {"rescale": True},
    {"norm": "layer"}, {"hidden": (4, 4)}])
def test_every_option_changes_the_update(change):
    def loss_of(cfg):
        agent = build(cfg, SPEC)
        torch.manual_seed(3)
        net, target = agent.network(), agent.network()
        return agent.loss(net, target, batch_of(4), torch.Generator()).per_item

    assert not torch.allclose(loss_of(BASE), loss_of(BASE.model_copy(update=change)))


def test_epsilon_is_per_lane():
    q = torch.tensor([[0.0, 1.0, 0.0, 0.0]]).repeat(2000, 1)
    epsilon = torch.cat([torch.zeros(1000), torch.ones(1000)])
    action = epsilon_greedy(q, ExplorationParams(epsilon), torch.Generator().manual_seed(0))
    assert (action[:1000] == 1).all()
    counts = torch.bincount(action[1000:], minlength=4)
    assert (counts > 200).all() and (counts < 300).all()
