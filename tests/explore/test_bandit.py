"""The bandit against a naive twin, its window, and arms that survive a checkpoint."""

import math

import numpy as np
import pytest
import torch

from qfleet.actor.actor import arm_shares
from qfleet.core.exploration import AdaptiveExplorer
from qfleet.explore import bandit, mixture
from qfleet.explore.bandit import Bandit
from qfleet.runs.checkpoint_parts import pack_state, unpack_state


class Twin:
    """All episodes in a list; whatever is asked is computed from its last ones."""

    def __init__(self, arms, window, rule, weight):
        self.arms, self.window, self.rule, self.weight, self.told = arms, window, rule, weight, []

    def scores(self):
        recent = self.told[-self.window:]
        found = []
        for arm in range(self.arms):
            own = [ret for which, ret in recent if which == arm]
            if not own:
                found.append(math.inf)
                continue
            mean = sum(own) / len(own)
            if self.rule == "ucb":
                found.append(mean + self.weight * math.sqrt(1 / len(own)))
                continue
            log = math.log(len(recent))
            span = max(r for _, r in recent) - min(r for _, r in recent)
            variance = sum((r - mean) ** 2 for r in own) / len(own) / (span**2 or 1) + math.sqrt(2 * log / len(own))
            found.append(mean + self.weight * span * math.sqrt(log / len(own) * min(0.25, variance)))
        return found


@pytest.mark.parametrize("rule", ["ucb", "ucb1_tuned"])
def test_scores_equal_the_naive_twin(rule):
    ours, twin = Bandit(5, 12, rule, 0.7), Twin(5, 12, rule, 0.7)
    rng = np.random.default_rng(0)
    for step in range(60):
        arm = ours.choose()
        assert arm == (step if step < 5 else int(np.argmax(twin.scores())))
        ret = float(rng.normal(arm, 2))
        ours.update(arm, ret)
        twin.told.append((arm, ret))
        np.testing.assert_allclose(ours.scores(), twin.scores(), rtol=1e-12)
        assert len(ours.history) == min(step + 1, 12), "one row holds one episode, and old ones go"


def test_it_finds_the_best_arm_and_follows_when_that_changes():
    ours = Bandit(6, 40, weight=0.5)
    rng = np.random.default_rng(1)
    counts = np.zeros((2, 6), int)
    for step in range(600):
        best = 2 if step < 300 else 5
        arm = ours.choose()
        counts[step // 300, arm] += 1
        ours.update(arm, float(rng.normal(1.0 * (arm == best), 0.2)))
    assert counts.argmax(1).tolist() == [2, 5] and counts.max(1).min() > 120 and ours.best() == 5


def best_arms_share(lanes, episodes=12_000, best=5, seed=1):
    """Of the episodes of so many lanes, whose lengths differ, the part that followed the best of 32 arms."""
    chooser = bandit.build(bandit.Config(arms=32, window=90, random=0.5), lanes, 0, lanes)
    chooser.seed(seed)
    rng = np.random.default_rng(seed)
    left, followed_best = rng.integers(50, 150, lanes), 0
    for _ in range(episodes):
        lane = int(left.argmin())
        left -= left[lane]
        arm = int(chooser.params(0).index[lane])
        followed_best += arm == best
        chooser.end_episode(lane, float(rng.normal(50.0 * (arm == best), 10)))
        left[lane] = rng.integers(50, 150)
    return followed_best / episodes


@pytest.mark.parametrize("lanes", [1, 4, 16, 64])
def test_the_best_arm_is_exploited_with_any_number_of_lanes(lanes):
    """Half of the choices are random: 51.6 % is the most there is. One lane forgets arms within its window of 90."""
    assert best_arms_share(lanes) > (0.3 if lanes == 1 else 0.45)


def test_an_arm_without_returns_is_tried_by_one_lane_at_a_time():
    ours = Bandit(4, 100)
    ours.dealt = 4
    for arm in (0, 1):
        ours.update(arm, 5.0 - arm)
    assert ours.choose() == 2 and ours.choose([2]) == 3, "the unknown come first"
    assert ours.choose([2, 3]) == 0, "their returns are on their way: the best of the known"
    assert ours.scores([0])[0] == 5 + math.sqrt(1 / 2), "an arm that is played counts as a trial"


def test_more_lanes_than_arms_begin_with_every_arm_alike():
    chooser = bandit.build(bandit.Config(arms=4, random=0), 12, 0, 12)
    chooser.seed(0)
    assert np.bincount(chooser.params(0).index, minlength=4).tolist() == [3, 3, 3, 3]


def test_the_window_grows_with_the_lanes():
    assert bandit.build(bandit.Config(arms=4, window=90), 16, 0, 16).bandit.window == 90 * 16


def test_arms_of_lanes_that_are_gone_are_not_waited_for():
    """An actor dies in the middle of its episodes, and the next has fewer lanes: arms that were played are free."""
    def made(lanes):
        found = bandit.build(bandit.Config(arms=4, random=0), lanes, 0, lanes)
        found.seed(0)
        return found

    before, after = made(4), made(1)
    before.end_episode(0, 1.0)
    before.end_episode(1, 2.0)
    after.load_state_dict(unpack_state(pack_state(before.state_dict())))
    found = []
    for _ in range(2):
        after.end_episode(0, None)
        found.append(int(after.params(0).index[0]))
        after.bandit.update(found[-1], 0.0)
    assert found == [2, 3], "of these nothing was heard"


def test_some_episodes_follow_any_arm():
    ours = Bandit(4, 50, weight=0.0, random=0.5)
    arms = []
    for _ in range(800):
        arms.append(ours.choose())
        ours.update(arms[-1], float(arms[-1] == 3))
    share = np.bincount(arms, minlength=4) / 800
    assert 0.5 < share[3] < 0.75 and share[:3].min() > 0.08


def test_a_bandit_that_knows_nothing_can_be_saved():
    ours = Bandit(4, 10)
    ours.load_state_dict(unpack_state(pack_state(ours.state_dict())))
    assert not ours.history and ours.best() == 0


@pytest.mark.parametrize("kind", [bandit, mixture])
def test_choosers_go_on_where_they_were(kind):
    def made():
        found = kind.build(kind.Config(arms=4), 3, 0, 3)
        found.seed(7)
        return found

    one, two = made(), made()
    assert isinstance(one, AdaptiveExplorer)
    for step in range(20):
        one.end_episode(step % 3, None if step == 5 else float(step % 4))
    two.load_state_dict(one.state_dict())
    for step in range(30):
        assert one.params(0).index.tolist() == two.params(0).index.tolist()
        for chooser in (one, two):
            chooser.end_episode(step % 3, float(step % 5))


def test_epsilon_may_belong_to_arms():
    lanes = bandit.build(bandit.Config(arms=4, epsilon=0.5, steepness=3), 4, 0, 4)
    arms = bandit.build(bandit.Config(arms=4, epsilon=0.5, steepness=3, epsilon_by="arm"), 2, 0, 8)
    arms.seed(0)
    assert arms.params(0).epsilon.tolist() == [lanes.params(0).epsilon[int(arm)] for arm in arms.params(0).index]


@pytest.mark.parametrize("kind", [bandit, mixture])
def test_what_part_of_the_lanes_follows_each_arm_is_known(kind):
    made = kind.build(kind.Config(arms=12), 8, 0, 8)
    made.seed(3)
    arm = made.params(0).to(torch.device("cpu"))
    shares = {f"arms/{index:02d}": arm.index.tolist().count(index) / 8 for index in range(12)}
    assert arm_shares(arm.index, arm.count) == shares and arm_shares(arm.index, 0) == {}


def test_a_bandit_refuses_to_remember_arms_that_it_has_not():
    """What it remembers may come from another process of a fleet."""
    state = Bandit(4, 10).state_dict() | {"history": [[1, 2.0], [4, 0.0]]}
    with pytest.raises(ValueError, match="a bandit of 4 arms cannot load a history with arm 4"):
        Bandit(4, 10).load_state_dict(state)
