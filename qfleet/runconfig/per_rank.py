"""Configuration of one rank of an allreduce run."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from qfleet.core.errors import UserError

if TYPE_CHECKING:
    from qfleet.runconfig.run_config import RunConfig


def per_rank(cfg: RunConfig, ranks: int) -> RunConfig:
    """Config for one of `ranks` ranks: batch size, learning rate, updates and replay per rank.

    Total steps and all periods remain those of the whole run. A config scaled for another number of ranks is rescaled;
    one that already fits is returned unchanged.
    """
    rule, learner, replay = cfg.allreduce, cfg.learner, cfg.replay
    before = rule.scaled_for or 1
    updates = cfg.total_updates
    if rule.batch == "global":
        whole = learner.batch_size * before
        if whole % ranks:
            raise UserError(f"learner.batch_size={whole} cannot be divided among {ranks} ranks: choose a multiple of "
                            f"{ranks}, or allreduce.batch=per_rank")
        learner = learner.model_copy(update={"batch_size": whole // ranks})
    elif ranks != before:
        growth = ranks / before
        power = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}[rule.rate_scaling]
        learner = learner.model_copy(update={"learning_rate": learner.learning_rate * growth**power})
        updates = None if updates is None else math.ceil(updates / growth)
    least = max(math.ceil(replay.min_steps * before / ranks), learner.batch_size)
    replay = replay.model_copy(update={"capacity": math.ceil(replay.capacity * before / ranks), "min_steps": least})
    return cfg.model_copy(update={
        "learners": ranks, "learner": learner, "replay": replay if ranks != before else cfg.replay,
        "total_updates": updates, "allreduce": rule.model_copy(update={"scaled_for": ranks})})
