"""Settings that shorten any run to seconds and keep what it is made of, for `qfleet train --smoke`."""

from __future__ import annotations

import json
from typing import Any

from qfleet.config import flatten, inactive_keys
from qfleet.config.layers import leaves
from qfleet.runconfig.run_config import RunConfig

EPISODE_STEPS, LANES, ACTORS_PER_LEARNER = 40, 4, 2
BATCH, SEQUENCES, UPDATES = 16, 8, 20
"""Batch sizes of agents that learn from steps and from sequences, and about how many updates are made."""

SEQUENCE = {"burn_in": 4, "unroll": 8, "stride": 8}
METRICS_PERIOD = 4
LEAST_STEPS, LEAST_REPLAY, CAPACITY = 300, 64, 4000


def smoke_overrides(config: RunConfig) -> list[str]:
    """Overrides that shorten a run to a few hundred steps: environment, agent, networks and processes stay the same.

    The run makes about `UPDATES` updates, and evaluates and saves in the middle and at the end.
    """
    flat = flatten(config)
    return [f"{key}={json.dumps(value)}" for key, value in leaves(_settings(config)) if key in flat
            and flat[key] != value]


def _settings(config: RunConfig) -> dict[str, Any]:
    agent, idle = config.agent, inactive_keys(config)
    sequence = {key: min(most, getattr(agent, key)) for key, most in SEQUENCE.items()
                if hasattr(agent, key) and f"agent.{key}" not in idle}
    batch = min(config.learner.batch_size, SEQUENCES if sequence else BATCH)
    chunk = _chunk_steps(config, sequence)
    lanes, actors = min(config.env.lanes, LANES), min(config.actors, ACTORS_PER_LEARNER * config.learners)
    total_lanes = (actors or config.learners) * config.env.groups * lanes
    min_steps = max(LEAST_REPLAY, batch)
    steps = max(LEAST_STEPS, 4 * total_lanes * chunk, 4 * config.learners * min_steps)
    half = steps // 2
    return {
        "total_steps": steps, "total_updates": None, "stop_at": None, "actors": actors,
        "env": {"lanes": lanes, "max_episode_steps": min(EPISODE_STEPS, config.env.max_episode_steps or EPISODE_STEPS)},
        "agent": sequence,
        "replay": {"capacity": max(min(config.replay.capacity, CAPACITY * config.learners), total_lanes * chunk, batch),
                   "min_steps": min_steps, "chunk_steps": chunk,
                   "samples_per_insert": round(UPDATES * batch / steps, 4)},
        "learner": {"batch_size": batch, "metrics_period_updates": METRICS_PERIOD,
                    "warmup_updates": min(config.learner.warmup_updates, UPDATES // 4),
                    "schedule_updates": None if config.learner.schedule == "constant" else UPDATES},
        "eval": {"period_steps": half, "period_updates": None, "episodes": 1, "lanes": 1,
                 "from_return": None, "max_episode_steps": None, "final_episodes": 0},
        "checkpoint": {"period_steps": half, "period_updates": None},
        "run": {"exact_resume": False, "wandb": False, "mlflow": False,
                "log_period_steps": max(1, steps // 6), "log_period_updates": None}}


def _chunk_steps(config: RunConfig, sequence: dict[str, int]) -> int:
    """Short chunks, which still hold an n-step return and a whole number of sequence starts."""
    stride = sequence.get("stride", 1)
    least = max(8, getattr(config.agent, "n_step", 1))
    return min(config.replay.chunk_steps, -(-least // stride) * stride)
