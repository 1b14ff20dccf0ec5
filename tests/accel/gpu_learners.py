"""Agents and settings that the tests on a GPU share, and how they measure a difference between two runs."""

from __future__ import annotations

import contextlib

import pytest
import torch
from image_learners import CURIOUS, RECURRENT, SPEC
from torch import nn

from qfleet.accel import graph_gradient, graph_policy, graph_update
from qfleet.algos import c51, ddpg, dqn, hlgauss, iqn, qr
from qfleet.core.env import Box, EnvSpec, Leaf

GPU = torch.device("cuda", 0)
PIXELS = EnvSpec("pixels", {"obs": Leaf((4, 84, 84), "uint8", "image", stack=4)}, num_actions=6)
REACH = EnvSpec("reach", {"obs": Leaf((3,), "float32", "vector")}, 0, box=Box((2,), (-2.0, 0.0), (2.0, 1.0)))
"""Images large enough for the Nature torso, which has kernels of its own in bfloat16; and continuous control."""


class Patches(nn.Module):
    """An encoder of a user: one convolution."""

    def __init__(self, observation):
        super().__init__()
        (leaf,) = observation.values()
        self.layers = nn.Sequential(nn.Conv2d(leaf.shape[0], 16, 12, 12), nn.ReLU(), nn.Flatten())

    def forward(self, obs):
        return self.layers(obs["obs"])


VALUE_BASED = [(dqn, {"dueling": True, "n_step": 3}, PIXELS), (dqn, {"norm": "layer", "munchausen": True}, PIXELS),
               (c51, {"noisy": True, "atoms": 11}, PIXELS), (qr, {"quantiles": 7}, PIXELS), (iqn, {"n_step": 2}, SPEC),
               (hlgauss, {"munchausen": True, "atoms": 11}, PIXELS),
               (dqn, {"encoder": f"{__name__}:Patches", "dueling": True, "noisy": True}, PIXELS)]
WITH_STATE = [(*RECURRENT, SPEC), *((*each, SPEC) for each in CURIOUS)]
CONTROL = [(ddpg, {"norm": "layer"}, REACH)]
EVERY_AGENT = [*VALUE_BASED, *WITH_STATE, *CONTROL]


@pytest.fixture
def same_kernels(monkeypatch):
    """Eager and captured code use the same deterministic library kernels.

    By default a capture lets libraries time several kernels and take the fastest, which rounds differently. Without
    that, what is captured should be what runs eagerly, and the comparison can be strict.
    """
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    for module in (graph_update, graph_gradient, graph_policy):
        monkeypatch.setattr(module, "fast_math", lambda bf16: contextlib.nullcontext())


def named(case):
    """Name of a case in a test's name."""
    if isinstance(case, dict):
        return "-".join(f"{key}={value}" for key, value in list(case.items())[:1])
    return getattr(case, "id", None) or getattr(case, "__name__", str(case)).rpartition(".")[2]


def make_updates(learner, count):
    learner.max_updates_per_step = count
    learner.step()


def distance(one, other, begin):
    """Distance of two weight vectors, over the way from the initial one to the second."""
    return float((one - other).norm() / (other - begin).norm())
