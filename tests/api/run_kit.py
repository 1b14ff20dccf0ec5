"""Tiny runs of several agents, and what two runs must share to be equal: all metrics but timings, and all weights."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from qfleet.runs.checkpoint import Checkpoints
from qfleet.runs.metric_writers import read_metrics

TINY = ["env.lanes=2", "replay.chunk_steps=8", "replay.min_steps=64", "learner.batch_size=8",
        "replay.samples_per_insert=4", "eval.episodes=2", "run.tensorboard=false", "run.log_period_steps=50",
        "run.threads=1", "stop_at=null", "env.max_episode_steps=50"]
DQN = ["cartpole", "agent.hidden=[16]", "replay.alpha=0.6", "agent.n_step=3"]
NOISY_C51 = ["cartpole", "agent.hidden=[16]", "agent.algo=c51", "agent.noisy=true", "explore.kind=constant",
             "explore.epsilon=0", "replay.store=device"]
R2D2 = ["hidden-cartpole", "agent.hidden=[16]", "agent.units=8", "agent.features=[8]", "agent.burn_in=4",
        "agent.unroll=8", "agent.stride=4", "replay.alpha=0.9", "replay.samples_per_insert=1"]
DDPG = ["pendulum", "agent.hidden=[16]", "explore.warmup_steps=100"]
NOT_COMPARED = ("time_s", "time/*", "*_ms", "*_share", "*/seconds", "replay/bytes*")


def arguments(recipe: list[str], *overrides: str) -> tuple[str, list[str]]:
    """Recipe name and overrides of a tiny run."""
    return recipe[0], [*TINY, *recipe[1:], *overrides]


def metrics(run: Path) -> list[dict[str, Any]]:
    """Records of a run without timings."""
    return [{tag: value for tag, value in record.items() if not any(fnmatchcase(tag, each) for each in NOT_COMPARED)}
            for record in read_metrics(run / "metrics.jsonl")]


def weights(run: Path) -> dict[str, list[Any]]:
    """Every tensor of the newest checkpoint's policy, and the learner's state."""
    checkpoint = Checkpoints(run / "checkpoints", 1).newest()
    assert checkpoint is not None
    state = {name: str(value) for name, value in _flat(checkpoint.state()["learner"]).items()}
    return {name: value.tolist() for name, value in checkpoint.policy().items()} | state


def _flat(state: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(state, dict):
        return {prefix: state.tolist() if hasattr(state, "tolist") else state}
    return {key: value for name, inner in state.items() for key, value in _flat(inner, f"{prefix}/{name}").items()}


def words(error: BaseException) -> str:
    return re.sub(r"\s+", " ", str(error))
