"""Actors of NGU compare embeddings of one version of the network only, however often its weights change."""

import numpy as np
import pytest
import torch
from test_ngu import SPEC, config

from qfleet.algos import ngu, novelty


class Walk:
    """Lanes that visit the same five observations again and again while the network is trained at every step."""

    def __init__(self, lanes=4, capacity=2000, seed=0):
        self.cfg = config(neighbours=10, episodic_capacity=capacity, modulator_max=1)
        torch.manual_seed(seed)
        self.net, self.rng = ngu.make_curiosity(self.cfg, SPEC), torch.Generator().manual_seed(seed)
        self.recall = ngu.make_recurrent_state(self.cfg, SPEC)
        self.memory = self.recall.initial(lanes, torch.device("cpu"))
        self.places, self.at = torch.randn(5, 3, generator=self.rng), torch.zeros(lanes, dtype=torch.int64)
        self.version = 0

    def step(self, over=()):
        """Train, end the episodes of some lanes, and wonder; the bonus [N]."""
        with torch.inference_mode():
            for parameter in self.net.embed.parameters():
                parameter += 0.01 * torch.randn(parameter.shape, generator=self.rng)
            self.version += 1
            ends = torch.zeros(len(self.at), dtype=torch.bool)
            ends[list(over)] = True
            self.memory = self.recall.reset(self.memory, ends)
            self.at = (self.at + torch.randint(5, self.at.shape, generator=self.rng)) % 5
            bonus, self.memory = ngu.intrinsic_reward(self.net, {"obs": self.places[self.at]}, self.memory, self.cfg)
        return bonus

    def used(self, lane):
        """The weights that a lane embeds with."""
        which = "episodic.new" if self.memory["episodic.newer"][lane] else "episodic.old"
        return self.memory[which].clone()

    def newest(self):
        return ngu.flatten_parameters(self.net.embed)


@pytest.fixture(params=[False, True], ids=["seen", "avoid_sync"])
def unseen(request, monkeypatch):
    """As on a CPU, and as on a GPU, where everything is computed since nothing is waited for."""
    monkeypatch.setattr(novelty, "avoid_sync", lambda tensor: request.param)


def test_what_is_known_stays_known_while_the_embedding_learns(unseen):
    """Late in an episode every place was seen more than ten times: the bonus is 1/√10, the neighbours being ten."""
    walk, ages, late = Walk(), np.zeros(4, int), []
    for step in range(600):
        over = [lane for lane in range(4) if ages[lane] > 120 + 20 * lane]
        ages[over] = 0
        bonus = walk.step(over)
        ages += 1
        if step > 150:
            late += bonus[torch.from_numpy(ages > 100)].tolist()
    assert len(late) > 300
    assert np.mean(late) == pytest.approx(1 / 10**0.5, rel=0.02) and max(late) < 0.4


def test_a_lane_keeps_its_weights_until_its_episode_is_over_and_then_gets_newer_ones(unseen):
    walk, rng = Walk(lanes=5), np.random.default_rng(2)
    walk.step()
    held, since = [walk.used(lane) for lane in range(5)], np.ones(5, int)
    for _ in range(400):
        over = [lane for lane in range(5) if rng.random() < 0.05]
        walk.step(over)
        for lane in range(5):
            if lane not in over:
                assert torch.equal(walk.used(lane), held[lane]), "never changed in mid-episode"
        before = since.copy()
        for lane in over:
            held[lane] = walk.used(lane)
            fellow = [other for other in range(5) if other not in over and torch.equal(held[other], held[lane])]
            since[lane] = before[fellow[0]] if fellow else walk.version
            assert fellow or torch.equal(held[lane], walk.newest()), "the newest, or those of a lane that began before"
        assert len({tuple(weights[:3].tolist()) for weights in held}) <= 2
    assert (walk.version - since).max() < 200, "two of the longest episodes at most"


def test_lanes_that_begin_together_take_the_newest_weights(unseen):
    walk = Walk(lanes=3)
    for step in range(40):
        walk.step(range(3) if step % 10 == 0 else ())
        if step % 10 == 0:
            assert all(torch.equal(walk.used(lane), walk.newest()) for lane in range(3))


def test_an_episode_without_end_does_not_keep_the_others_waiting(unseen):
    walk, taken = Walk(lanes=3, capacity=50), []
    for step in range(400):  # the first lane never ends; of the others one is always under way
        walk.step([1 + step // 7 % 2] if step % 7 == 0 else ())
        if torch.equal(walk.used(1 + step // 7 % 2), walk.newest()):
            taken.append(step)
    assert max(np.diff(taken)) <= 2 * 50 + 14
    counts = walk.memory["episodic.count"]
    assert counts[0] <= 50 and counts[1:].max() <= 14


def test_a_full_memory_forgets_the_oldest_as_long_as_its_weights_are_the_newest(unseen):
    walk = Walk(lanes=2, capacity=20)
    with torch.inference_mode():
        for _ in range(60):
            bonus, walk.memory = ngu.intrinsic_reward(walk.net, {"obs": walk.places[:2]}, walk.memory, walk.cfg)
    assert walk.memory["episodic.count"].tolist() == [60, 60] and float(bonus.max()) < 0.4
