"""Agents with random weights for any spaces, without an environment, and the checkpoints of such agents."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.envs.classic_control import CartPoleEnv

from qfleet.actor.policy import Policy
from qfleet.config import to_yaml
from qfleet.core.env import EnvSpec
from qfleet.envs.images import ImageFormat
from qfleet.envs.spaces import SpaceAdapter
from qfleet.envs.stored_spaces import spaces_to_json
from qfleet.interface.trained_agent import TrainedAgent
from qfleet.runconfig.build import make_agent
from qfleet.runconfig.resolution import resolve
from qfleet.runs.checkpoint import CheckpointMeta, Checkpoints

VECTOR = spaces.Box(-np.inf, np.inf, (3,), np.float64)
NESTED = spaces.Dict({
    "picture": spaces.Box(0, 255, (12, 10, 3), np.uint8),
    "inner": spaces.Tuple([spaces.Box(-2, 7, (2, 2), np.int16), spaces.Box(-1, 1, (), np.float32)]),
    "cell": spaces.Discrete(3, start=5), "levers": spaces.MultiDiscrete([2, 3], start=[0, -1]),
    "flags": spaces.MultiBinary(4)})
BOARDS = spaces.Dict({
    "board": spaces.Box(0, 1, (10, 10, 4), np.bool_), "signs": spaces.Box(-1, 1, (9, 9), np.int8),
    "planes": spaces.Box(-8, 8, (2, 6, 6), np.float64), "grid": spaces.MultiBinary((3, 5, 5)), "words": spaces.Text(5)})
SMALL = {"hidden": (16,), "features": (16,), "units": 8, "episodic_capacity": 3, "arms": 4, "quantiles": 7}


def agent_for(observation, action, *overrides, env="CartPole-v1", seed=3) -> TrainedAgent:
    """An agent of these spaces; the config names any environment, since none is built."""
    stacks = [int(word.partition("=")[2]) for word in overrides if word.startswith("env.stack=")]
    image = ImageFormat(*stacks, symbols="auto")
    adapter = SpaceAdapter(observation, action, image, 1024)
    spec = EnvSpec(env, adapter.encoder.leaves, adapter.actions.n, box=adapter.actions.box,
                   spaces=spaces_to_json(observation, action))
    if isinstance(action, spaces.Box):
        env = "Pendulum-v1"
    config = resolve(env, list(overrides)).config
    small = {name: size for name, size in SMALL.items() if name in type(config.agent).model_fields}
    config = config.model_copy(update={"agent": config.agent.model_copy(update=small)})
    return with_random_weights(config, spec, seed)


def with_random_weights(config, spec, seed=3) -> TrainedAgent:
    """The agent; its running statistics, if it has any, are random, too."""
    policy = Policy(make_agent(config, spec), seed, torch.device("cpu"))
    if policy.agent.row_values is not None:
        rng, size = torch.Generator().manual_seed(seed), len(policy.flat.buffer("row_mean"))
        policy.flat.set_buffers({"row_count": torch.tensor(10.0), "row_mean": torch.randn(size, generator=rng),
                                 "row_square": 100 * torch.rand(size, generator=rng)})
    return TrainedAgent(config, spec, policy)


def checkpoint_of(agent: TrainedAgent, folder: Path) -> Path:
    """The agent as a policy checkpoint."""
    meta = CheckpointMeta(to_yaml(agent.config), agent.spec, {"mean_reward": 12.5}, "run-id")
    return Checkpoints(folder, 1).save_policy(40, 7, agent.policy.flat.state(), meta)


def cartpole(*overrides) -> TrainedAgent:
    env = CartPoleEnv()
    return agent_for(env.observation_space, env.action_space, "agent.algo=dqn", *overrides)
