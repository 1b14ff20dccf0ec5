"""Tabular Q-learning: the table is indexed by all entries, and an update is Watkins' rule."""

from collections import defaultdict

import gymnasium
import numpy as np
import pytest
import torch

import qfleet
from qfleet.algos import tabular
from qfleet.core.env import EnvSpec, Leaf
from qfleet.core.errors import UserError
from qfleet.core.replay import Sample
from qfleet.runconfig.resolution import resolve

GRID = {"place": Leaf((2,), "int32", "category", (3, 4)), "key": Leaf((1,), "int32", "category", (2,))}
SPEC = EnvSpec("grid", GRID, 3)


def sample_of(place, key, action, reward, discount):
    """B items of two rows each: where the action was taken, and what followed."""
    rows = {"obs.place": place, "obs.key": key, "action": action, "reward": reward, "discount": discount,
            "last": torch.zeros(*reward.shape, dtype=torch.bool)}
    return Sample(np.arange(len(reward)), torch.ones(len(reward)), rows)


def test_every_combination_of_entries_has_a_row_of_its_own():
    assert tabular.count_states(GRID) == 24
    table = tabular.QTable(GRID, 24, 3)
    table.table.data = torch.arange(72.0).view(24, 3)
    place = torch.cartesian_prod(torch.arange(3), torch.arange(4)).repeat_interleave(2, 0).int()
    key = torch.arange(2).repeat(12)[:, None].int()
    assert table({"place": place, "key": key})[:, 0].tolist() == [3.0 * row for row in range(24)]


def test_an_update_moves_each_value_by_alpha_times_the_mean_error_of_its_items():
    agent = tabular.build(tabular.Config(double=False, gamma=0.9), SPEC)
    net, target = agent.network(), agent.network()
    rng, items, alpha = np.random.default_rng(0), 64, 0.25
    place = torch.from_numpy(np.stack([rng.integers(3, size=(items, 2)), rng.integers(4, size=(items, 2))], -1)).int()
    key = torch.from_numpy(rng.integers(2, size=(items, 2, 1))).int()
    action = torch.from_numpy(rng.integers(3, size=(items, 2)))
    reward = torch.from_numpy(rng.normal(size=(items, 2)).astype(np.float32))
    discount = torch.from_numpy((rng.random((items, 2)) < 0.8).astype(np.float32))

    wanted, q, q_target = (x.table.detach().clone().double().numpy() for x in (net, net, target))
    errors = defaultdict(list)
    for i in range(items):
        s, s_next = ((place[i, t, 0] * 4 + place[i, t, 1]) * 2 + key[i, t, 0] for t in (0, 1))
        y = float(reward[i, 0]) + 0.9 * float(discount[i, 0]) * q_target[s_next].max()
        errors[int(s), int(action[i, 0])].append(y - q[s, action[i, 0]])
    assert len(errors) < items, "some items have the same state and action"
    for entry, of_entry in errors.items():
        wanted[entry] += alpha * np.mean(of_entry)

    optimizer = torch.optim.SGD(net.parameters(), lr=alpha)
    sample = sample_of(place, key, action, reward, discount)
    loss = agent.loss(net, target, sample, torch.Generator())
    loss.per_item.mean().backward()
    optimizer.step()
    np.testing.assert_allclose(net.table.detach().numpy(), wanted, rtol=1e-5, atol=1e-6)


def test_observations_that_are_not_discrete_or_have_too_many_combinations_are_refused():
    with pytest.raises(UserError, match="needs Discrete observations"):
        tabular.build(tabular.Config(), EnvSpec("x", {"obs": Leaf((4,), "float32", "vector")}, 2))
    large = {"obs": Leaf((3,), "int32", "category", (100, 100, 100))}
    with pytest.raises(UserError, match=r"at most 100,000 states.*1,000,000 combinations: use agent\.algo=dqn"):
        tabular.build(tabular.Config(), EnvSpec("x", large, 2))


@pytest.mark.parametrize("key", ["agent.hidden=[8]", "agent.dueling=true", "agent.norm=layer"])
def test_options_of_networks_are_refused(key):
    with pytest.raises(UserError, match="a table instead of a network"):
        resolve("discrete", ["env.id=FrozenLake-v1", key])


@pytest.mark.parametrize(("env_id", "recipe"), [("CliffWalking-v1", "discrete"), ("Blackjack-v1", "discrete"),
                                                ("CartPole-v1", "cartpole"), ("Acrobot-v1", "vector")])
def test_discrete_observations_get_a_table_and_others_a_network(env_id, recipe):
    assert resolve(env_id).provenance["learner.learning_rate"] == f"recipe {recipe}"


class TwoStates(gymnasium.Env):
    """Two states in turn; the action with the number of the state has the reward 1."""

    observation_space = gymnasium.spaces.Discrete(2, start=3)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.state = self.steps = 0
        return 3, {}

    def step(self, action):
        reward, self.state, self.steps = float(action == self.state), 1 - self.state, self.steps + 1
        return 3 + self.state, reward, False, self.steps == 20, {}


@pytest.mark.timeout(60)
def test_the_default_learns_with_fewer_states_than_items_of_a_batch(tmp_path):
    result = qfleet.train(TwoStates, total_steps=4_000, run={"root": tmp_path, "threads": 1},
                          eval={"period_steps": 4_000, "final_episodes": 0})
    assert result.best == 20


@pytest.mark.timeout(120)
def test_cliff_walking_is_solved_by_its_default(tmp_path):
    result = qfleet.train("CliffWalking-v1", total_steps=20_000, stop_at=-13, run={"root": tmp_path, "threads": 1},
                          eval={"period_steps": 2_500, "final_episodes": 0})
    assert result.best == -13, "the shortest way along the cliff"
