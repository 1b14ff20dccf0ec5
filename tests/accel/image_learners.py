"""Learners of small pictures on a device store, by agent: what tests of recordings share."""

import numpy as np
import torch
from fakes import ListMetrics

from qfleet.algos import agent57, c51, dqn, hlgauss, iqn, ngu, qr, r2d2
from qfleet.algos.normalisation import NormaliseConfig, normalised
from qfleet.core.env import EnvSpec, Leaf
from qfleet.learner.learner import Learner, LearnerConfig
from qfleet.learner.weight_store import Mailbox
from qfleet.replay.chunker import Chunker
from qfleet.replay.config import ReplayConfig
from qfleet.replay.device_store import DeviceReplay
from qfleet.replay.layout import Layout

CPU = torch.device("cpu")
SPEC = EnvSpec("pictures", {"obs": Leaf((2, 12, 12), "uint8", "image", stack=2)}, num_actions=3)
AGENTS = [(dqn, {"dueling": True, "n_step": 3}), (c51, {"noisy": True, "atoms": 11}), (qr, {"quantiles": 7}),
          (iqn, {"munchausen": True, "n_step": 2}), (hlgauss, {"dueling": True, "atoms": 11})]
RECURRENT = (r2d2, {"burn_in": 2, "unroll": 4, "stride": 2, "n_step": 2, "features": [16], "units": 8})
WONDER = {"arms": 4, "embedding": 3, "episodic_capacity": 6, "neighbours": 2, "curious_hidden": [8]}
CURIOUS = [(ngu, RECURRENT[1] | WONDER), (agent57, RECURRENT[1] | WONDER), (agent57, WONDER | {"memory": "none"})]


def replay_of(agent, alpha=0.6, reward=1.0, spec=SPEC, device=CPU, store=DeviceReplay):
    layout = Layout(spec, agent.window, 8, agent.columns, agent.stored_states, agent.state_rows)
    cfg = ReplayConfig(capacity=400, min_steps=0, samples_per_insert=1e9, chunk_steps=8, alpha=alpha)
    replay, chunker, rng = store(layout, cfg, 3, device), Chunker(layout, 2), np.random.default_rng(1)
    for step in range(150):
        obs = {name: some_observations(leaf, 2, rng) for name, leaf in spec.observation.items()}
        last = np.array([step % 30 == 29, step % 50 == 49])
        extras = {name: (3 * rng.random((2, *shape))).astype(dtype)
                  for name, (shape, dtype) in {**agent.stored_states, **agent.columns}.items()}
        action = (rng.uniform(-1, 1, (2, *spec.box.shape)).astype(np.float32) if spec.box
                  else rng.integers(spec.num_actions, size=2))
        row = (obs, action, reward * rng.random(2).astype(np.float32), 1.0 - last, last, extras)
        replay.clock.count_steps(2)
        for _, chunk in chunker.append(*row):
            replay.add(chunk)
    return replay


def some_observations(leaf, lanes, rng):
    """Random observations [lanes, ...] of a leaf."""
    if leaf.dtype == "uint8":
        return rng.integers(0, 255, (lanes, *leaf.shape)).astype(np.uint8)
    return rng.normal(size=(lanes, *leaf.shape)).astype(leaf.dtype)


def agent_of(module, switches, spec=SPEC):
    return module.build(module.Config.model_validate({"algo": module.__name__.split(".")[-1], "hidden": [16],
                                                      **switches}), spec)


def learner_of(module, switches, metrics=None, alpha=0.6, reward=1.0, spec=SPEC, device=CPU, normalise=None, **cfg):
    agent = normalised(agent_of(module, switches, spec), NormaliseConfig(**normalise or {}), spec, 0.9)
    config = LearnerConfig.model_validate({"batch_size": 16, "precision": "fp32", "learning_rate": 1e-3,
                                           "target_period_updates": 3, "metrics_period_updates": 2} | cfg)
    replay = replay_of(agent, alpha, reward, spec, device)
    return Learner(agent, replay, Mailbox(), metrics or ListMetrics(), config, 5, device)
