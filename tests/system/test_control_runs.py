"""Continuous control as whole runs: LQR to its known optimum, in one process and in several; what users see of it."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from real_runs import newest, train, weights_hash

from qfleet import api
from qfleet.core.errors import UserError
from qfleet.envs.toy import LQR
from qfleet.replay.host_store import HostReplay
from qfleet.runconfig.resolution import recipe_for, resolve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

COMMON = ["env.lanes=4", "agent.n_step=1", "agent.gamma=0.95", "agent.hidden=[64,64]", "agent.norm=none",
          "agent.policy_rate=1", "explore.kind=gaussian", "explore.warmup_steps=200", "replay.min_steps=200",
          "replay.capacity=10000", "replay.samples_per_insert=64", "learner.batch_size=64",
          "learner.learning_rate=1e-3", "learner.target_tau=0.02", "learner.publish_period_updates=8",
          "eval.period_steps=null", "eval.episodes=4", "total_steps=4000"]
AGENTS = {
    "ddpg": ["agent.twin=false", "agent.smoothing=0", "agent.policy_delay=1"],
    "td3": [],
    "d4pg": ["agent.algo=d4pg", "agent.v_min=-8", "agent.v_max=0", "replay.alpha=0.6"],
}


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def words_of(name):
    """The kind before what else is said of the agent: a change of kind begins anew."""
    return [*AGENTS[name][:1], *COMMON, *AGENTS[name][1:]]


def cost_over_best(run, episodes=40):
    """What the newest weights cost from many starts, over the least possible: 1 is optimal."""
    agent, env, cost, best = api.load(run, which="latest"), LQR(), 0.0, 0.0
    for seed in range(episodes):
        (obs, _), over = env.reset(seed=seed), False
        best -= LQR.optimal_return(env.x, env.length)
        while not over:
            obs, reward, _, over, _ = env.step(agent.act(obs))
            cost -= reward
    return cost / best


@pytest.mark.parametrize("name", ["ddpg", "d4pg"])
def test_lqr_is_learnt_to_within_five_percent(name):
    result = train("toy/LQR-v0", *words_of(name))
    ratio = cost_over_best(result.directory)
    print(name, ratio)
    assert 1 <= ratio < 1.05


@pytest.mark.parametrize("alpha", [0, 0.6])
def test_actors_bring_priorities_where_these_count(alpha, monkeypatch):
    seen, add = [], HostReplay.add

    def spy(replay, chunk, priority=None):
        seen.append(priority)
        return add(replay, chunk, priority)

    monkeypatch.setattr(HostReplay, "add", spy)
    train("toy/LQR-v0", *words_of("d4pg"), f"replay.alpha={alpha}", "total_steps=400")
    assert len(seen) >= 8
    if alpha:
        found = np.concatenate(seen)
        assert np.isfinite(found).all() and len(np.unique(found)) > len(found) / 2
    else:
        assert seen == [None] * len(seen)


ROUGH = ["total_steps=2500"]
"""Short runs, which processes never make the same way twice: the mass comes to rest, at no more than twice the cost.
Doing nothing costs five times as much."""


def test_in_processes():
    words = [*words_of("d4pg"), *ROUGH, "normalise.observations=true", "actors=2", "env.lanes=2"]
    result = train("toy/LQR-v0", *words)
    assert newest(result.directory).manifest.updates > 1500
    assert cost_over_best(result.directory) < 2


def test_with_two_ranks():
    words = [*words_of("ddpg"), *ROUGH, "sync=allreduce", "learners=2", "env.lanes=2"]
    assert cost_over_best(train("toy/LQR-v0", *words).directory) < 2


def test_one_learner_at_a_parameter_server_is_solo():
    """Over the real wire, in three shards, with a policy that moves at a rate of its own."""
    words = [*words_of("td3"), "total_steps=300", "replay.min_steps=100",
             "agent.policy_rate=0.3", "normalise.observations=true", "normalise.rewards=true", "agent.hidden=[16,16]"]
    solo = train("toy/LQR-v0", *words, "run.name=solo").directory
    served = ["sync=server", "parameter_server.shards=3", "device=cpu"]
    one = train("toy/LQR-v0", *words, "run.name=one", *served).directory
    assert weights_hash(solo) == weights_hash(one)
    a, b = newest(solo).state()["learner"], newest(one).state()["learner"]
    assert all(torch.equal(a["gradients"][name], b["gradients"][name]) for name in ("mean", "square", "steps"))
    assert all(torch.equal(value, b["target"][name]) for name, value in a["target"].items())


class Painter(gymnasium.Env):
    """A dot on a picture is to be met by two numbers; best return 0."""

    observation_space = spaces.Box(0, 255, (36, 36), np.uint8)
    action_space = spaces.Box(np.array([[0], [0]], np.float32), np.array([[10], [1]], np.float32))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.dot = 0, self.np_random.integers(0, 36, 2)
        return self._picture(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.t += 1
        wish = np.array([[10], [1]]) * self.dot[:, None] / 35
        return self._picture(), -float(np.abs((action - wish) / [[10], [1]]).sum()), False, self.t == 5, {}

    def render(self):
        return np.repeat(self._picture()[:, :, None], 3, 2)

    def _picture(self):
        picture = np.zeros((36, 36), np.uint8)
        picture[tuple(self.dot)] = 255
        return picture


def test_pictures_and_boxes_of_any_shape_through_training_evaluation_export_and_act():
    words = ["env.lanes=2", "env.stack=2", "total_steps=200", "replay.min_steps=64", "replay.capacity=2000",
             "replay.samples_per_insert=4", "explore.warmup_steps=20"]
    result = train("test_control_runs:Painter", *words)
    assert resolve("test_control_runs:Painter").config.explore.kind == "gaussian"
    out = api.export(result.directory, "alone")
    for path in (result.directory, out):
        assert api.evaluate(path, episodes=2, trust=True).episodes == 2
        agent = api.load(path, trust=True)
        one, two = agent.act(np.zeros((2, 36, 36), np.uint8)), agent.act(np.zeros((3, 2, 36, 36), np.uint8))
        assert Painter.action_space.contains(one) and two.shape == (3, 2, 1)
        np.testing.assert_allclose(two[0], one, rtol=1e-5)
    assert sum(step.done for step in api.rollout(result.directory, episodes=2, render=False)) == 2


@pytest.mark.parametrize(("recipe", "words", "why"), [
    ("pendulum", ["env.id=CartPole-v1"], "CartPole-v1 has 2 actions, and agent.algo=ddpg needs continuous ones"),
    ("vector", ["env.id=Pendulum-v1"], "and agent.algo=dqn needs discrete ones: use agent.algo=ddpg"),
    ("cartpole", ["agent.algo=c51", "env.id=Pendulum-v1"], "and agent.algo=c51 needs discrete ones")])
def test_agents_and_environments_that_do_not_fit_are_refused_with_the_remedy(recipe, words, why):
    with pytest.raises(UserError) as error:
        api.train(recipe, words)
    assert why in str(error.value) and "`qfleet train" in str(error.value)


def test_an_environment_finds_its_recipe():
    found = {id: recipe_for(id) for id in ("Pendulum-v1", "MountainCarContinuous-v0", "HalfCheetah-v5", "Hopper-v5")}
    assert list(found.values()) == ["pendulum", "mountaincar-continuous", "halfcheetah", "hopper"]
    assert resolve("toy/LQR-v0").config.agent.twin, "any other gets TD3"
