"""Fakes that log their calls: an environment that counts steps, a replay, metrics in lists."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from qfleet.core.agent import Agent, Decision, Loss
from qfleet.core.env import EnvSpec, Leaf, StepResult
from qfleet.core.replay import Sample, Window

SPEC = EnvSpec("tape", {"obs": Leaf((1,), "float32", "vector")}, num_actions=3)
TOY = EnvSpec("toy", {"obs": Leaf((3,), "float32", "vector")}, num_actions=4)


def toy_batch(seed, rows=4, items=16):
    """Random batch for the `TOY` spec: `items` windows of `rows` rows, some of them the last of an episode."""
    rng = torch.Generator().manual_seed(seed)
    last = torch.rand(items, rows, generator=rng) < 0.2
    return Sample(torch.arange(items).numpy(), torch.rand(items, generator=rng), {
        "obs.obs": torch.randn(items, rows, 3, generator=rng), "last": last,
        "action": torch.randint(4, (items, rows), generator=rng, dtype=torch.int32),
        "reward": torch.randn(items, rows, generator=rng) * ~last, "discount": 1.0 * ~last})


class TapeEnv:
    """Environment whose lane i ends its episodes after `lengths[i]` steps; the observation is the step of the episode.

    Calls are logged in `tape`. `cut_next` marks the lanes whose episode is aborted at the next step.
    """

    spec = SPEC

    def __init__(self, lengths, truncate=False, tape=None):
        self.lengths, self.truncate, self.tape = lengths, truncate, tape if tape is not None else []
        self.lanes = len(lengths)
        self.cut_next = np.zeros(self.lanes, bool)
        self.rebuilt = 0
        self.resets = []

    def reset(self, seeds):
        self.resets.append(list(seeds))
        self.tape.append("reset")
        self.t = np.zeros(self.lanes, int)
        self.over = np.zeros(self.lanes, bool)
        return self.obs()

    def obs(self):
        return {"obs": self.t[:, None].astype(np.float32)}

    def send(self, actions):
        self.tape.append("send")
        self.actions = actions

    def recv(self):
        self.tape.append("recv")
        fresh = self.over | self.cut_next
        self.rebuilt += int(self.cut_next.sum())
        self.t = np.where(fresh, 0, self.t + 1)
        self.over = (self.t == self.lengths) & ~fresh
        zero = np.zeros(self.lanes, np.float32)
        reward = np.where(fresh, zero, 1).astype(np.float32)
        discount = np.where(fresh | (self.over & (not self.truncate)), 0, 1).astype(np.float32)
        cut, self.cut_next = self.cut_next, np.zeros(self.lanes, bool)
        return StepResult(self.obs(), reward, discount, self.over.copy(), 10 * reward, cut)

    def render(self):
        return None

    def faults(self):
        return self.rebuilt

    def close(self):
        self.tape.append("close")


class ListClock:
    """Step clock that lists every count."""

    def __init__(self):
        self.counts = []

    @property
    def steps(self):
        return sum(self.counts)

    def count_steps(self, steps):
        self.counts.append(steps)


class TapeReplay:
    """Replay that accepts every chunk (unless `waiting`), returns the given samples in order, logs calls in `tape`."""

    def __init__(self, tape=None, samples=()):
        self.tape = tape if tape is not None else []
        self.chunks, self.updates, self.waiting = [], [], False
        self.samples = list(samples)

    def add(self, chunk, priority=None):
        if self.waiting:
            return None
        self.tape.append("add")
        self.chunks.append(chunk)
        return len(self.chunks)

    def sample(self, n):
        self.tape.append("sample")
        return self.samples.pop(0) if self.samples else None

    def update(self, keys, priority):
        self.tape.append("update")
        self.updates.append((list(keys), list(priority)))


class ListMetrics:
    """Metrics that are kept in lists."""

    def __init__(self):
        self.episodes, self.values, self.counts = [], [], {}

    def write(self, values):
        self.values.append(dict(values))

    def count(self, name, by=1):
        self.counts[name] = self.counts.get(name, 0) + by

    def episode(self, episode):
        self.episodes.append((episode.lane, episode.reward, episode.length))


def linear_agent(loss=None):
    """Agent with one weight per action that always takes action 2; the default loss is w·reward."""

    def act(net, obs, memory, arm, rng):
        return Decision(torch.full((len(obs["obs"]),), 2))

    def weighted(net, target, batch, rng):
        obs = batch.rows["obs.obs"][:, 0].to(next(net.parameters()).dtype)
        value = net(obs).float().sum(1) * batch.rows["reward"][:, 0]
        return Loss(value, value.detach().abs() + 1)

    return Agent(lambda: nn.Linear(1, 3, bias=False), act, loss or weighted, Window())


def sample_of(rewards, weight=None, keys=None):
    """Batch of two-row windows with the given rewards, one per item."""
    reward = torch.tensor(rewards, dtype=torch.float32)[:, None].repeat(1, 2)
    items = len(rewards)
    return Sample(np.arange(items) if keys is None else keys, torch.ones(items) if weight is None else weight,
                  {"obs.obs": torch.ones(items, 2, 1), "reward": reward, "discount": torch.ones(items, 2),
                   "last": torch.zeros(items, 2, dtype=torch.bool), "action": torch.zeros(items, 2, dtype=torch.int32)})
