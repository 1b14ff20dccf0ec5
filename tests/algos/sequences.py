"""An actor that plays for a test, and the replay that it filled."""

from __future__ import annotations

import torch

from qfleet.actor.actor import Actor, Recorder
from qfleet.actor.policy import Policy
from qfleet.envs import EnvConfig, make
from qfleet.explore.constant import Constant
from qfleet.replay.config import ReplayConfig
from qfleet.replay.host_store import HostReplay
from qfleet.replay.layout import Layout
from qfleet.training.evaluation import EpisodeCounter


def played(env_id, build, lanes=3, steps=400, explorer=None, chunk_steps=16, **kwargs):
    """Agent, policy and replay after some steps with ε = 0.5; alpha = 1, so that a leaf is a priority."""
    env = make(EnvConfig(id=env_id, lanes=lanes, kwargs=kwargs), lanes)
    agent = build(env.spec)
    layout = Layout(env.spec, agent.window, chunk_steps, agent.columns, agent.stored_states, agent.state_rows)
    cfg = ReplayConfig(capacity=4_000, min_steps=0, samples_per_insert=100, chunk_steps=chunk_steps, alpha=1.0)
    replay = HostReplay(layout, cfg, 0, torch.device("cpu"))
    policy = Policy(agent, 0, torch.device("cpu"))
    actor = Actor(policy, env, explorer or Constant(0.5, lanes), EpisodeCounter(0, lanes), None,
                  Recorder(agent, layout, lanes, replay, True), replay.clock)
    actor.begin(range(lanes))
    for _ in range(steps):
        assert actor.step()
    env.close()
    return agent, policy, replay
