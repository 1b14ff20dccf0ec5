"""NGU by its parts: wonder against naive lists, stored columns, rewards and discounts by arm, networks of curiosity."""

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch
from sequences import played

from qfleet.algos import agent57, ngu
from qfleet.algos.ngu import Config, build
from qfleet.core.agent import ExplorationParams
from qfleet.core.env import EnvSpec, Leaf
from qfleet.core.replay import Sample
from qfleet.explore import mixture
from qfleet.maths.bellman import n_step
from qfleet.maths.novelty import NoveltyKernel, episodic_bonus, modulator
from qfleet.maths.policy_family import betas, gammas
from qfleet.networks.curiosity import Curiosity
from qfleet.networks.encoder import Encoder

SPEC = EnvSpec("toy", {"obs": Leaf((3,), "float32", "vector")}, num_actions=4)
SMALL = {"features": (8,), "units": 6, "hidden": (8,), "burn_in": 3, "unroll": 8, "stride": 4, "n_step": 2, "arms": 5,
         "episodic_capacity": 7, "neighbours": 3, "curious_hidden": (8,), "embedding": 4, "surprise_outputs": 6}
KINDS = [{"memory": memory, "targets": targets} for memory in ("lstm", "none") for targets in ("retrace", "n_step")]


def config(**changes):
    return Config(**(SMALL | changes))


def drawn(lanes=3, arms=5):
    explorer = mixture.build(mixture.Config(arms=arms, epsilon=0.5, steepness=1), lanes, 0, lanes)
    explorer.seed(3)
    return explorer


def test_wonder_equals_a_naive_walk_through_lists():
    cfg = config()
    torch.manual_seed(0)
    net = ngu.make_curiosity(cfg, SPEC)
    recall = ngu.make_recurrent_state(cfg, SPEC)
    memory, lists = recall.initial(3, torch.device("cpu")), [[], [], []]
    kernel = NoveltyKernel(3, cfg.kernel_epsilon, cluster=cfg.cluster_distance, similarity=cfg.max_similarity)
    distance, surprise, rng = [], [], np.random.default_rng(1)
    with torch.inference_mode():
        for step in range(40):
            obs = {"obs": torch.from_numpy(rng.normal(size=(3, 3)).astype(np.float32))}
            bonus, memory = ngu.intrinsic_reward(net, obs, memory, cfg)
            keys, errors = net.embed(obs).double().numpy(), net.rnd_error(obs).double().numpy()
            near = np.full((3, 3), np.inf)
            for lane, seen in enumerate(lists):
                apart = sorted(((keys[lane] - other) ** 2).sum() for other in seen[-cfg.episodic_capacity:])[:3]
                near[lane, :len(apart)] = apart
            if np.isfinite(near).any():
                distance.append(near[np.isfinite(near)].mean())
            surprise.append(errors)
            mean = torch.full((3,), np.mean(distance) if distance else 1.0, dtype=torch.float64)
            means = [np.mean([e.mean() for e in surprise[:n + 1]]) for n in range(step + 1)]
            var = np.mean([((e - m) ** 2).mean() for e, m in zip(surprise, means, strict=True)])
            wanted = episodic_bonus(torch.from_numpy(near), mean, kernel) * modulator(
                torch.from_numpy(errors), torch.tensor(means[-1]), torch.tensor(var**0.5), cfg.modulator_max)
            np.testing.assert_allclose(bonus.numpy(), wanted.numpy(), rtol=2e-3, atol=1e-4)
            for lane, seen in enumerate(lists):
                seen.append(keys[lane])
            over = rng.random(3) < 0.1
            memory = recall.reset(memory, torch.from_numpy(over))
            lists = [[] if end else seen for end, seen in zip(over, lists, strict=True)]
    assert float(bonus.max()) > 0 and float(memory["distance.count"]) == len(distance)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS[:3])
@pytest.mark.parametrize("env_id", ["toy/TMaze-v0", "toy/Catch-v0"])
def test_the_learner_sees_what_the_actor_saw(env_id, kind):
    cfg = config(**kind)
    agent, policy, replay = played(env_id, lambda spec: stored_q(build(cfg, spec), spec), explorer=drawn())
    sample = replay.sample(128)
    past = cfg.burn_in if cfg.memory == "lstm" else 0
    effective = cfg if past else cfg.model_copy(update={"burn_in": 0, "unroll": 1})
    with torch.inference_mode():
        q = ngu.window_q_values(policy.flat.net.q, sample, effective, replay.layout.spec.num_actions)
    seen, last = sample.rows["seen"][:, past:], sample.rows["last"][:, past:]
    real = ~last | ~torch.cat([torch.ones_like(last[:, :1]), last[:, :-1]], 1)
    assert float((q - seen)[real].abs().max()) < 2e-5
    assert len(sample.rows["arm"].unique()) > 2 and sample.rows["bonus"].max() > 0
    assert agent.columns.keys() >= {"bonus", "arm"}


def stored_q(agent, spec):
    def act(*args):
        decision = agent.act(*args)
        return dataclasses.replace(decision, extras=decision.extras | {"seen": decision.extras["q"]})

    return dataclasses.replace(agent, columns={**agent.columns, "seen": ((spec.num_actions,), "float32")}, act=act)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_actor_and_learner_agree_on_priorities(kind):
    agent, policy, replay = played("toy/HiddenCartPole-v0", lambda spec: build(config(double=False, **kind), spec),
                                   explorer=drawn())
    sample = replay.sample(256)
    net = policy.flat.net
    wanted = agent.loss(net, net, sample, policy.rng).priority.detach().numpy()
    given = replay._priorities.tree.get(sample.keys)
    np.testing.assert_allclose(given, np.maximum(wanted, 1e-6), rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("module", [ngu, agent57])
def test_arms_and_actions_that_do_not_exist_do_not_end_the_learner(module):
    """A member of a fleet may send any numbers in columns that only the agent knows."""
    cfg = module.Config(**SMALL)
    agent, policy, replay = played("toy/TMaze-v0", lambda spec: module.build(cfg, spec), steps=60, explorer=drawn())
    sample, net = replay.sample(8), policy.flat.net
    for wild in (-7, 99):
        rows = sample.rows | {name: torch.full_like(sample.rows[name], wild) for name in ("arm", "state.action")}
        found = agent.loss(net, net, dataclasses.replace(sample, rows=rows), policy.rng)
        assert found.per_item.isfinite().all() and found.priority.isfinite().all()


def transitions(items=6, seed=0):
    rng = torch.Generator().manual_seed(seed)
    last = torch.zeros(items, 3, dtype=torch.bool)
    last[::2, 1] = True
    rows = {"obs.obs": torch.randn(items, 3, 3, generator=rng), "last": last,
            "action": torch.randint(4, (items, 3), generator=rng, dtype=torch.int32),
            "reward": torch.randn(items, 3, generator=rng) * ~last, "discount": 1.0 * ~last,
            "bonus": torch.rand(items, 3, generator=rng), "arm": torch.arange(items, dtype=torch.int32)[:, None] % 5
            + torch.zeros(1, 3, dtype=torch.int32), "mu": torch.full((items, 3), 0.7)}
    return Sample(np.arange(items), torch.ones(items), rows)


def test_every_arm_learns_its_own_rewards_and_discount():
    cfg = config(memory="none", targets="n_step", rescale=False, double=False, eta=1.0)
    agent = build(cfg, SPEC)
    torch.manual_seed(0)
    net, batch = agent.network(), transitions()
    found, rows = agent.loss(net, net, batch, torch.Generator()), batch.rows
    beta, gamma = betas(5, cfg.beta), gammas(5, cfg.gamma, cfg.gamma_min)
    with torch.no_grad():
        for item in range(6):
            arm = int(rows["arm"][item, 0])
            side = torch.nn.functional.one_hot(rows["arm"][item].long(), 5)
            q = net.q({"obs": rows["obs.obs"][item]}, side)
            arrived = torch.cat([rows["bonus"][item, 1:], torch.zeros(1)])
            step = n_step((rows["reward"][item] + beta[arm] * arrived)[None], rows["discount"][item][None],
                          rows["last"][item][None], gamma[arm], 2)
            y = step.ret[0, 0] + step.discount[0, 0] * q[step.row[0, 0]].max()
            td = float((y - q[0, rows["action"][item, 0].long()]).abs())
            assert float(found.priority[item]) == pytest.approx(td, abs=1e-5)


@pytest.mark.parametrize("epsilon", [0.0, 0.01])
def test_actors_store_how_probable_their_choice_was_where_retrace_asks(epsilon):
    agent = build(config(memory="none", target_epsilon=epsilon), SPEC)
    assert ("mu" in agent.columns) == (epsilon > 0)
    assert "mu" not in build(config(memory="none", targets="n_step"), SPEC).columns
    torch.manual_seed(0)
    net, memory = agent.network(), agent.recurrent_state.initial(64, torch.device("cpu"))
    arm = ExplorationParams(torch.linspace(0, 1, 64))
    found = agent.act(net, {"obs": torch.randn(64, 3)}, memory, arm, torch.Generator().manual_seed(1))
    best = found.extras["q"].argmax(1) == found.action
    torch.testing.assert_close(found.extras["mu"], torch.where(best, 1 - 0.75 * arm.epsilon, arm.epsilon / 4))
    assert 0 < int(best.sum()) < 64


def test_observations_are_normalised_before_they_surprise():
    """A normalisation that is computed and not used would not change the error."""
    torch.manual_seed(0)
    net = Curiosity(SPEC.observation, 4, partial(Encoder, torso="auto", norm="none"), (8,), 4, 6)
    obs = {"obs": 50 + 3 * torch.randn(400, 3)}
    before = net.rnd_error(obs)
    for name, value in net.normaliser.updated_statistics(obs).items():
        net.normaliser.get_buffer(name).copy_(value)
    assert not torch.allclose(before, net.rnd_error(obs))
    clean = net.normaliser(obs)["obs"]
    assert float(clean.mean().abs()) < 1e-3 and float(clean.std()) == pytest.approx(1, abs=0.02)


def test_running_figures_of_parts_are_those_of_the_whole():
    net = Curiosity(SPEC.observation, 4, partial(Encoder, torso="auto", norm="none"), (8,), 4, 6).normaliser
    x = 5 + torch.randn(300, 3)
    for part in x.split([10, 90, 200]):
        for name, value in net.updated_statistics({"obs": part}).items():
            net.get_buffer(name).copy_(value)
    torch.testing.assert_close(net.mean_0, x.mean(0), atol=1e-4, rtol=0)
    torch.testing.assert_close(net.var_0, x.var(0, unbiased=False), atol=1e-4, rtol=0)


def test_the_extra_loss_trains_curiosity_and_nothing_else():
    agent = build(config(memory="none", surprise_share=1), SPEC)
    torch.manual_seed(0)
    net = agent.network()
    agent.loss(net, agent.network(), transitions(), torch.Generator()).extra.backward()
    touched = {name.split(".")[0:2][-1] if name.startswith("curiosity") else "q"
               for name, parameter in net.named_parameters() if parameter.grad is not None and parameter.grad.any()}
    assert touched == {"embed", "inverse", "predictor"}


def test_the_embedding_learns_which_action_was_taken():
    cfg = config(memory="none")
    torch.manual_seed(0)
    net = ngu.make_curiosity(cfg, SPEC)
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    step = torch.eye(3)[torch.tensor([0, 1, 2, 0])] * torch.tensor([1.0, 1, 1, -1])[:, None]
    rng = torch.Generator().manual_seed(1)
    for _ in range(150):
        now, action = torch.randn(64, 3, generator=rng), torch.randint(4, (64,), generator=rng)
        logits = net.predict_action(net.embed({"obs": now}), net.embed({"obs": now + step[action]}))
        loss = torch.nn.functional.cross_entropy(logits, action)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float((logits.argmax(1) == action).float().mean()) > 0.9
