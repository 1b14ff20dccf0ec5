"""The bandit against a naive twin, its window, and arms that survive a checkpoint."""

import math

import numpy as np
import pytest
import torch

from qfleet.explore import Chooser, bandit, mixture
from qfleet.explore.bandit import Bandit
from qfleet.roles.actor import followed


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
            log = math.log(len(recent))
            if self.rule == "ucb":
                found.append(mean + self.weight * math.sqrt(log / len(own)))
                continue
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
        ours.tell(arm, ret)
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
        ours.tell(arm, float(rng.normal(1.0 * (arm == best), 0.2)))
    assert counts.argmax(1).tolist() == [2, 5] and counts.max(1).min() > 120 and ours.best() == 5


def test_some_episodes_follow_any_arm():
    ours = Bandit(4, 50, weight=0.0, random=0.5)
    arms = []
    for _ in range(800):
        arms.append(ours.choose())
        ours.tell(arms[-1], float(arms[-1] == 3))
    share = np.bincount(arms, minlength=4) / 800
    assert 0.5 < share[3] < 0.75 and share[:3].min() > 0.08


@pytest.mark.parametrize("kind", [bandit, mixture])
def test_choosers_go_on_where_they_were(kind):
    def made():
        found = kind.build(kind.Config(arms=4), 3, 0, 3)
        found.seed(7)
        return found

    one, two = made(), made()
    assert isinstance(one, Chooser)
    for step in range(20):
        one.episode(step % 3, None if step == 5 else float(step % 4))
    two.load_state_dict(one.state_dict())
    for step in range(30):
        assert one.arms(0).index.tolist() == two.arms(0).index.tolist()
        for chooser in (one, two):
            chooser.episode(step % 3, float(step % 5))


def test_epsilon_may_belong_to_arms():
    lanes = bandit.build(bandit.Config(arms=4, base=0.5, alpha=3), 4, 0, 4)
    arms = bandit.build(bandit.Config(arms=4, base=0.5, alpha=3, epsilon_by="arm"), 2, 0, 8)
    arms.seed(0)
    assert arms.arms(0).epsilon.tolist() == [lanes.arms(0).epsilon[int(arm)] for arm in arms.arms(0).index]


@pytest.mark.parametrize("kind", [bandit, mixture])
def test_what_part_of_the_lanes_follows_each_arm_is_known(kind):
    made = kind.build(kind.Config(arms=12), 8, 0, 8)
    made.seed(3)
    arm = made.arms(0).to(torch.device("cpu"))
    shares = {f"arms/{index:02d}": arm.index.tolist().count(index) / 8 for index in range(12)}
    assert followed(arm.index, arm.count) == shares and followed(arm.index, 0) == {}
