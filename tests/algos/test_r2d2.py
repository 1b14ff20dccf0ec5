"""R2D2 by its parts: replayed states are the actor's, burn-in and padding change nothing, losses equal naive loops."""

import dataclasses

import numpy as np
import pytest
import torch
from sequences import played

from qfleet.algos import r2d2
from qfleet.algos.r2d2 import Config, build, last_action_reward, state_columns, window_last_action_reward
from qfleet.algos.r2d2 import unroll_q as unrolled_beside
from qfleet.core.env import EnvSpec, Leaf
from qfleet.core.errors import UserError
from qfleet.core.replay import Sample
from qfleet.maths.value_rescaling import h, h_inverse

SMALL = {"features": (8,), "units": 6, "hidden": (8,), "burn_in": 3, "unroll": 8, "stride": 4, "n_step": 2}
SPEC = EnvSpec("toy", {"obs": Leaf((3,), "float32", "vector")}, num_actions=4)


def unrolled(net, batch, cfg, actions=SPEC.num_actions):
    return unrolled_beside(net, batch, window_last_action_reward(batch.rows, actions), cfg)


def config(**changes):
    return Config(**(SMALL | changes))


def batch_of(cfg, items=24, seed=0):
    """Sequences of every kind: with padding before the episode, after it, both or none, and lives lost on the way."""
    rng, length = np.random.default_rng(seed), cfg.window.length
    last = np.ones((items, length), bool)
    for item in range(items):
        lead = rng.integers(cfg.burn_in + 1) if item % 2 else 0
        stop = rng.integers(cfg.burn_in + 1, length + 1) if item % 3 else length
        last[item, lead:stop] = False
    real = ~last | ~np.concatenate([np.ones((items, 1), bool), last[:, :-1]], 1)
    begins_empty = last[:, 0]
    rows = {"obs.obs": rng.normal(size=(items, length, 3)) * real[:, :, None],
            "reward": rng.normal(size=(items, length)) * ~last,
            "discount": (rng.random((items, length)) < 0.85) * ~last,
            "last": last, "action": rng.integers(4, size=(items, length)) * ~last}
    for name, (shape, dtype) in state_columns(cfg.units).items():
        values = rng.integers(5, size=(items, 1)) if dtype == "int32" else rng.normal(size=(items, 1, *shape))
        rows[name] = np.where(begins_empty.reshape(-1, *[1] * (values.ndim - 1)), 0, values)
    kinds = {"last": torch.bool, "action": torch.int32, "state.action": torch.int32}
    return Sample(np.arange(items), torch.ones(items),
                  {name: torch.from_numpy(values).to(kinds.get(name, torch.float64)) for name, values in rows.items()})


def networks(cfg, spec=SPEC):
    torch.manual_seed(1)
    agent = build(cfg, spec)
    return agent, agent.network().double(), agent.network().double()


def naive_values(net, batch, item, cfg):
    """Row by row, a step of the network at a time; padding is not played at all. {row: q [A]}."""
    rows, found = batch.rows, {}
    state = tuple(rows[name][item, 0][None] * (cfg.state == "stored") for name in ("state.h", "state.c"))
    action, reward = rows["state.action"][item, 0], rows["state.reward"][item, 0]
    begun = False
    for row in range(cfg.window.length):
        last = bool(rows["last"][item, row])
        if last and not begun:
            continue
        begun = True
        q, state = net(
            {"obs": rows["obs.obs"][item, row][None, None]},
            last_action_reward(action, reward, 4)[None, None], torch.ones(1, 1, dtype=torch.bool), state)
        found[row] = q[0, 0]
        action, reward = rows["action"][item, row] + 1, rows["reward"][item, row]
        if last:
            break
    return found


def naive_errors(cfg, online, target, rows, item):
    """y − q at every trained row that is real and not final."""
    forward, back = (h, h_inverse) if cfg.rescale else (lambda x: x, lambda x: x)
    errors = []
    for row in range(cfg.burn_in, cfg.burn_in + cfg.unroll):
        if rows["last"][item, row]:
            break
        at, ret, scale = row, 0.0, 1.0
        while at < row + cfg.n_step and not rows["last"][item, at]:
            ret = ret + scale * rows["reward"][item, at]
            scale = scale * cfg.gamma * rows["discount"][item, at]
            at += 1
        best = (online if cfg.double else target)[at].argmax()
        y = forward(ret + scale * back(target[at][best]))
        errors.append(float(y - online[row][rows["action"][item, row].long()]))
    return np.array(errors)


@pytest.mark.parametrize("changes", [
    {}, {"state": "zero"}, {"double": False, "rescale": False}, {"burn_in": 0, "dueling": False}, {"loss": "huber"},
    {"n_step": 5, "eta": 0.5}])
def test_the_loss_equals_a_naive_loop(changes):
    cfg = config(**changes)
    agent, net, target = networks(cfg)
    batch = batch_of(cfg)
    out = agent.loss(net, target, batch, torch.Generator())
    with torch.no_grad():
        for item in range(len(batch.weight)):
            td = naive_errors(cfg, naive_values(net, batch, item, cfg), naive_values(target, batch, item, cfg),
                              batch.rows, item)
            assert len(td) >= 1
            each = np.where(np.abs(td) <= 1, 0.5 * td**2, np.abs(td) - 0.5) if cfg.loss == "huber" else td**2
            assert float(out.per_item[item]) == pytest.approx(each.sum() / cfg.unroll, abs=1e-6)
            mixed = cfg.eta * np.abs(td).max() + (1 - cfg.eta) * np.abs(td).mean()
            assert float(out.priority[item]) == pytest.approx(mixed, abs=1e-6)


def test_what_padding_holds_does_not_matter():
    """Nor in the first sequence of a batch, and no value is bootstrapped out of it: a mask on another axis would."""
    cfg = config()
    agent, net, target = networks(cfg)
    batch = batch_of(cfg)
    rows, last = dict(batch.rows), batch.rows["last"]
    padding = last & torch.cat([torch.ones_like(last[:, :1]), last[:, :-1]], 1)
    assert padding[0::2].any() and padding[1::2].any()
    for name in ("obs.obs", "reward", "discount"):
        rows[name] = torch.where(padding.view(*last.shape, *[1] * (rows[name].ndim - 2)), 7.0, rows[name])
    rows["action"] = torch.where(padding, 3, rows["action"])
    spoilt = dataclasses.replace(batch, rows=rows)
    one, two = (agent.loss(net, target, each, torch.Generator()) for each in (batch, spoilt))
    assert torch.equal(one.per_item, two.per_item) and torch.equal(one.priority, two.priority)


@pytest.mark.parametrize("state", ["stored", "zero"])
def test_no_gradient_reaches_into_the_burn_in(state):
    cfg = config(state=state)
    agent, net, target = networks(cfg)
    batch = batch_of(cfg)
    obs = batch.rows["obs.obs"].clone().requires_grad_()
    out = agent.loss(net, target, dataclasses.replace(batch, rows=batch.rows | {"obs.obs": obs}), torch.Generator())
    out.per_item.sum().backward()
    assert not obs.grad[:, :cfg.burn_in].any()
    assert obs.grad[:, cfg.burn_in].any() and obs.grad[:, cfg.burn_in + cfg.unroll // 2].any()
    assert all(parameter.grad is None for parameter in target.parameters())


def test_burning_in_is_playing_the_same_rows_without_training_on_them():
    cfg = config(burn_in=4)
    _, net, _ = networks(cfg)
    batch = batch_of(cfg)
    whole = unrolled(net, batch, cfg.model_copy(update={"burn_in": 0}))
    torch.testing.assert_close(unrolled(net, batch, cfg), whole[:, 4:], atol=1e-6, rtol=0)


def test_a_lane_that_remembers_nothing_still_does_after_padding():
    net = r2d2.recurrent.LSTMCore(5, 7)
    zero = torch.zeros(3, 7), torch.zeros(3, 7)
    out, (hidden, cell) = net(torch.randn(3, 9, 5), torch.zeros(3, 9, dtype=torch.bool), zero)
    assert not out.any() and not hidden.any() and not cell.any()
    assert net(torch.randn(3, 9, 5), torch.ones(3, 9, dtype=torch.bool), zero)[0].all()


def test_strides_that_leave_steps_out_are_refused():
    with pytest.raises(UserError, match=r"stride=9 exceeds agent\.unroll=8"):
        build(config(stride=9), SPEC)


# What an actor does, and what a learner with the same weights makes of it.

def stored_q(agent, spec):
    """The same agent, which also stores the values it saw."""
    return dataclasses.replace(agent, columns={"seen": ((spec.num_actions,), "float32")},
                               act=lambda *args: _also(agent.act(*args)))


def _also(decision):
    return dataclasses.replace(decision, extras=decision.extras | {"seen": decision.extras["q"]})


@pytest.mark.parametrize("env_id", ["toy/TMaze-v0", "toy/HiddenCartPole-v0", "toy/Catch-v0"])
@pytest.mark.parametrize("changes", [{}, {"burn_in": 0, "unroll": 16, "stride": 8}])
def test_unrolling_from_stored_states_reproduces_what_the_actor_saw(env_id, changes):
    cfg = config(**changes)
    _, policy, replay = played(env_id, lambda spec: stored_q(build(cfg, spec), spec))
    sample = replay.sample(256)
    with torch.inference_mode():
        q = unrolled(policy.flat.net, sample, cfg, replay.layout.spec.num_actions)
    seen, last = sample.rows["seen"][:, cfg.burn_in:], sample.rows["last"][:, cfg.burn_in:]
    real = ~last | ~torch.cat([torch.ones_like(last[:, :1]), last[:, :-1]], 1)
    assert sample.rows["state.h"].any() and real.sum() > 1000
    assert float((q - seen)[real].abs().max()) < 1e-5


@pytest.mark.parametrize("changes", [{}, {"n_step": 5, "rescale": False, "eta": 0.3}])
def test_actor_and_learner_agree_on_priorities(changes):
    agent, policy, replay = played("toy/HiddenCartPole-v0", lambda spec: build(config(double=False, **changes), spec))
    sample = replay.sample(256)
    net = policy.flat.net
    wanted = agent.loss(net, net, sample, policy.rng).priority.detach().numpy()
    given = replay._priorities.tree.get(sample.keys)
    np.testing.assert_allclose(given, np.maximum(wanted, 1e-6), rtol=1e-3, atol=2e-5)
    assert np.ptp(given) > 0


def test_drift_is_zero_for_the_actors_own_weights_and_grows_with_others():
    cfg = config(measure_drift=True)
    agent, policy, replay = played("toy/HiddenCartPole-v0", lambda spec: build(cfg, spec))
    sample = replay.sample(128)

    def drifts(net, **changes):
        changed = build(cfg.model_copy(update=changes), replay.layout.spec)
        metrics = changed.loss(net, net, sample, policy.rng).metrics
        return float(metrics["train/drift_first"]), float(metrics["train/drift_last"])

    assert max(drifts(policy.flat.net)) < 1e-4
    torch.manual_seed(5)
    other = agent.network()
    stored, zero = drifts(other), drifts(other, state="zero")
    assert min(stored) > 1e-3 and stored[0] != zero[0]
    assert drifts(policy.flat.net, state="zero")[0] > drifts(policy.flat.net, state="zero")[1] > 1e-5, "it wears off"
