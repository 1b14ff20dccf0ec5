"""Running normalisation: every agent acts and learns as on inputs that a naive loop has normalised."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from qfleet.actor.policy import Policy
from qfleet.algos.normalisation import RETURN, SCALE, NormaliseConfig, normalised
from qfleet.core.agent import LAST_REWARD, ROW_MOMENTS, Decision, ExplorationParams, Loss
from qfleet.core.compute import seeded_network
from qfleet.core.env import Box, EnvSpec, Leaf
from qfleet.core.errors import UserError
from qfleet.core.replay import Sample
from qfleet.runconfig import describe
from qfleet.runconfig.build import make_agent
from qfleet.runconfig.resolution import resolve

LEAVES = {"speed": Leaf((2, 2), "float32", "vector"), "door": Leaf((), "int32", "category", (3,)),
          "view": Leaf((1, 6, 6), "uint8", "image"), "load": Leaf((), "float32", "vector")}
DISCRETE, CONTINUOUS = EnvSpec("toy", LEAVES, 4), EnvSpec("toy", LEAVES, 0, box=Box((2,), (-1.0, -1.0), (1.0, 1.0)))
SEQUENCE = ["agent.features=[8]", "agent.units=6", "agent.burn_in=1", "agent.unroll=2", "agent.stride=2",
            "agent.n_step=2"]
CURIOUS = [*SEQUENCE, "agent.arms=3", "agent.episodic_capacity=7", "agent.neighbours=2", "agent.embedding=4",
           "agent.curious_hidden=[8]", "explore.kind=bandit", "explore.arms=3"]
AGENTS = {
    "dqn": ["cartpole", "agent.n_step=3", "agent.munchausen=true"],
    "c51": ["cartpole", "agent.algo=c51", "agent.n_step=2"], "hlgauss": ["cartpole", "agent.algo=hlgauss"],
    "qr": ["cartpole", "agent.algo=qr"], "iqn": ["cartpole", "agent.algo=iqn", "agent.rescale=true"],
    "r2d2": ["hidden-cartpole", *SEQUENCE], "ngu": ["hidden-cartpole", "agent.algo=ngu", *CURIOUS],
    "agent57": ["hidden-cartpole", "agent.algo=agent57", *CURIOUS],
    "ddpg": ["pendulum"], "td3": ["pendulum", "agent.twin=true", "agent.smoothing=0.1", "agent.policy_delay=2"],
    "d4pg": ["pendulum-d4pg"]}
GAMMA, LANES, COUNT, SEVERAL = 0.9, 6, 50, 1000.0
BOTH = NormaliseConfig(observations=True, rewards=True, observation_clip=3.0, reward_clip=2.0)


class Naive:
    """The formulas, with statistics of the values [speed, speed, speed, speed, load, return]."""

    mean = np.array([5.0, -SEVERAL, 0.1, 3.0, 7.0, 2.0])
    deviation = np.array([2.0, SEVERAL, 0.01, 0.0, 4.0, 12.0])

    def observations(self, obs):
        def clean(x, part):
            return np.clip((x - self.mean[part]) / np.sqrt(self.deviation[part] ** 2 + 1e-8), -3, 3).astype(np.float32)

        speed = obs["speed"].reshape(*obs["speed"].shape[:-2], 4)
        return obs | {"speed": clean(speed, slice(0, 4)).reshape(obs["speed"].shape), "load": clean(obs["load"], 4)}

    def rewards(self, reward):
        return np.clip(reward / np.sqrt(12.0**2 + 1e-8), -2, 2).astype(np.float32)


def pair(name):
    """An agent without and with normalisation, with equal weights."""
    recipe, *words = AGENTS[name]
    config = resolve(recipe, [*words, "agent.hidden=[8]"]).config
    agent = make_agent(config, CONTINUOUS if "pendulum" in recipe else DISCRETE)
    other = normalised(agent, BOTH, DISCRETE, GAMMA)
    nets = [seeded_network(each, 3) for each in (agent, other)]
    for buffer, value in zip(ROW_MOMENTS, (COUNT, Naive.mean, COUNT * Naive.deviation**2), strict=True):
        nets[1].get_buffer(buffer).copy_(torch.as_tensor(value))
    return (agent, nets[0]), (other, nets[1])


def observation(rng):
    scale = np.array([4.0, 5 * SEVERAL, 0.03, 0.0]).reshape(2, 2)
    speed = Naive.mean[:4].reshape(2, 2) + scale * rng.normal(size=(LANES, 2, 2))
    return {"speed": speed.astype(np.float32), "door": rng.integers(0, 3, LANES).astype(np.int32),
            "view": rng.integers(0, 256, (LANES, 1, 6, 6)).astype(np.uint8),
            "load": rng.normal(7, 9, LANES).astype(np.float32)}


def tensors(arrays):
    return {name: torch.from_numpy(np.asarray(x)) for name, x in arrays.items()}


@cache
def play(name):
    """Both agents with their networks, their rows [N, T, ...], and the discounted returns before each row.

    Episodes end at different times.
    """
    agents, naive, rng = pair(name), Naive(), np.random.default_rng(0)
    steps = agents[0][0].window.length
    tenth = torch.full((LANES,), 0.1)
    explore = ExplorationParams(tenth, index=torch.arange(LANES) % 3, sigma=tenth)
    memories = [None if each.recurrent_state is None else each.recurrent_state.initial(LANES, torch.device("cpu"))
                for each, _ in agents]
    generators, rows, returns, seen = [torch.Generator().manual_seed(1) for _ in agents], ([], []), [], np.zeros(LANES)
    for t in range(steps):
        raw, reward = observation(rng), rng.normal(0, 15, LANES).astype(np.float32)
        over = np.arange(LANES) == t
        taken = []
        for i, (agent, net) in enumerate(agents):
            obs, gain = (raw, reward) if i else (naive.observations(raw), naive.rewards(reward))
            with torch.no_grad():
                decision = agent.act(net, tensors(obs), memories[i], explore, generators[i])
                extras = dict(decision.extras)
                if agent.evaluate_actions is not None:
                    extras |= agent.evaluate_actions(net, tensors(obs), decision.action)
            taken.append(decision.action)
            row = {"action": decision.action, "reward": torch.from_numpy(gain * ~over),
                   "discount": torch.from_numpy(1.0 * ~over).float(), "last": torch.from_numpy(over), **extras}
            rows[i].append(row | {f"obs.{leaf}": x for leaf, x in tensors(obs).items()})
            memories[i] = decision.memory
            if agent.recurrent_state is not None:
                memory = agent.recurrent_state.observe(decision.memory, torch.from_numpy(gain))
                memories[i] = agent.recurrent_state.reset(memory, torch.from_numpy(over))
        torch.testing.assert_close(taken[0], taken[1])
        returns.append(seen)
        seen = np.where(over, 0, GAMMA * seen + reward)
    stacked = [{key: torch.stack([row[key] for row in each], 1) for key in each[0]} for each in rows]
    return agents, stacked, np.stack(returns, 1)


def sample(agent, rows):
    stored = {name: rows[name][:, list(agent.state_rows)] for name in agent.stored_states}
    return Sample(np.arange(LANES), torch.ones(LANES), {**rows, **stored})


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_acts_and_learns_as_on_inputs_normalised_by_hand(name):
    agents, (by_hand, raw), returns = play(name)
    (plain, plain_net), (agent, net) = agents
    np.testing.assert_allclose(raw[RETURN], returns, rtol=1e-5)
    assert torch.allclose(raw[SCALE], torch.tensor(12.0))
    assert set(agent.columns) - set(plain.columns) == {RETURN} and set(agent.priority_inputs) >= {SCALE}
    for key in (*plain.columns, *plain.priority_inputs):
        torch.testing.assert_close(by_hand[key], raw[key], rtol=1e-4, atol=1e-5)
    for loss, other_loss in ((plain.loss, agent.loss), (plain.loss_when_frozen, agent.loss_when_frozen)):
        if loss is not None:
            expected = loss(plain_net, plain_net, sample(plain, by_hand), torch.Generator().manual_seed(4))
            found = other_loss(net, net, sample(agent, raw), torch.Generator().manual_seed(4))
            torch.testing.assert_close(found.per_item, expected.per_item, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(found.priority, expected.priority, rtol=1e-4, atol=1e-5)
            assert float(found.metrics["train/reward_scale"]) == pytest.approx(12)
    torch.testing.assert_close(agent.priority(raw), plain.priority(by_hand), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", AGENTS)
def test_greedy_actions_are_the_same_and_values_are_in_units_of_the_raw_return(name):
    (plain, plain_net), (agent, net) = pair(name)
    naive, raw = Naive(), observation(np.random.default_rng(2))
    memory, clean = {}, {}
    if plain.greedy_state:
        initial = plain.recurrent_state.initial(LANES, torch.device("cpu"))
        memory = {key: initial[key] for key in plain.greedy_state}
        memory[LAST_REWARD] = torch.linspace(-40, 40, LANES)
        clean = {LAST_REWARD: torch.from_numpy(naive.rewards(memory[LAST_REWARD].numpy()))}
    with torch.no_grad():
        expected = plain.greedy(plain_net, tensors(naive.observations(raw)), memory | clean)
        found = agent.greedy(net, tensors(raw), memory)
    torch.testing.assert_close(found.action, expected.action)
    if "q" in expected.extras:
        torch.testing.assert_close(found.extras["q"], 12 * expected.extras["q"], rtol=1e-4, atol=1e-4)
        acted = agent.act(net, tensors(raw), agent.recurrent_state.initial(LANES, torch.device("cpu")),
                          ExplorationParams(torch.zeros(LANES), False), torch.Generator())
        torch.testing.assert_close(agent.q_values(acted.extras), 12 * plain.q_values(acted.extras))


def test_padding_rows_have_finite_priorities():
    _, (_, raw), _ = play("dqn")
    blank = {key: torch.zeros_like(x) for key, x in raw.items()} | {"last": torch.ones_like(raw["last"])}
    assert pair("dqn")[1][0].priority(blank).isfinite().all()


def probe(**cfg):
    """An agent that lists the observations it acts on and the batches it learns from."""
    seen = []

    def act(net, obs, memory, explore, rng):
        seen.append(obs)
        return Decision(torch.zeros(LANES), memory)

    def loss(net, target, batch, rng):
        seen.append(batch)
        return Loss(torch.zeros(LANES), torch.zeros(LANES))

    agent = replace(pair("dqn")[0][0], act=act, loss=loss)
    return normalised(agent, BOTH.model_copy(update=cfg), DISCRETE, GAMMA), seen


def test_a_loss_gets_every_reward_scaled_and_no_raw_observations():
    (_, (agent, net)), (_, raw), _ = play("dqn")
    one, seen = probe()
    one.loss(net, net, sample(agent, raw), torch.Generator())
    np.testing.assert_allclose(seen[0].rows["reward"], Naive().rewards(raw["reward"].numpy()), rtol=1e-6)
    assert not any(key.startswith("obs.") for key in seen[0].rows)
    assert set(seen[0].leaves) == set(LEAVES) and seen[0].obs(1)["speed"].abs().max() <= 3


def test_nothing_is_normalised_before_the_first_row():
    agent, seen = probe(rewards=False, observation_clip=1e9)
    net, raw = seeded_network(agent, 1), tensors(observation(np.random.default_rng(0)))
    agent.act(net, raw, None, None, None)
    assert all(torch.equal(seen[0][name], raw[name]) for name in LEAVES)
    assert [float(net.get_buffer(name).sum()) for name in ROW_MOMENTS] == [0, 0, 0]


def test_an_agent_is_unchanged_if_nothing_is_normalised():
    agent = pair("dqn")[0][0]
    assert normalised(agent, NormaliseConfig(), DISCRETE, GAMMA) is agent


def test_a_policy_may_be_asked_for_other_numbers_of_lanes():
    policy = Policy(pair("dqn")[1][0], 1, torch.device("cpu"))
    for lanes in (1, 4, 2):
        if policy.memory is not None:
            policy.observe(np.ones(lanes, np.float32), np.zeros(lanes, bool))
        obs = {name: x[:lanes] for name, x in observation(np.random.default_rng(0)).items()}
        assert policy.act(obs, ExplorationParams(torch.zeros(lanes)))[0].shape == (lanes,)


IMAGES = EnvSpec("board", {"view": LEAVES["view"], "door": LEAVES["door"]}, 4)


def test_what_has_no_effect_is_refused():
    agent = make_agent(resolve("cartpole").config, IMAGES)
    with pytest.raises(UserError, match=r"normalise\.observations=true is for vectors, and board has only images"):
        normalised(agent, NormaliseConfig(observations=True), IMAGES, GAMMA)
    with pytest.raises(UserError, match=r"needs the discount factor agent\.gamma, and this algorithm has none"):
        normalised(agent, NormaliseConfig(rewards=True), IMAGES, None)
    assert normalised(agent, NormaliseConfig(rewards=True), IMAGES, GAMMA).row_values is not None


@pytest.mark.parametrize(("words", "why"), [
    (["cartpole", "normalise.reward_clip=5"], "normalise.reward_clip: has no effect without normalise.rewards=true"),
    (["cartpole", "normalise.observation_clip=5"], "no effect without normalise.observations=true"),
    (["cartpole", "normalise.rewards=true", "env.clip_rewards=true"], "set env.clip_rewards=false"),
    (["pong", "normalise.rewards=true"], "env.clip_rewards=true (the default of Atari games)"),
    (["pendulum", "agent.normalise=true"], "normalise.observations")])
def test_contradictions_are_errors_that_name_the_remedy(words, why):
    with pytest.raises(UserError) as error:
        resolve(words[0], words[1:])
    assert why in str(error.value)


def test_explain_says_that_a_run_would_fail():
    found = {line.key: line for line in describe.explain(resolve(
        "toy/Catch-v0", ["normalise.observations=true", "env.kwargs.pixels=true"]))}
    line = found["normalise.observations"]
    assert not line.active and "only images or categories" in line.idle and "a run would fail" in line.idle
    assert found["normalise.reward_clip"].idle == "without normalise.rewards=true"

