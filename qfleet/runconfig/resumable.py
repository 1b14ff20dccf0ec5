"""Keys that may change when a run is resumed."""

from __future__ import annotations

from collections.abc import Collection

from qfleet.config import (
    flatten,
    inactive_keys,
)
from qfleet.core.errors import UserError
from qfleet.runconfig.describe import Difference, _yaml_word, diff
from qfleet.runconfig.run_config import RunConfig
from qfleet.runs.directory import RunSection
from qfleet.training.checkpointer import CheckpointConfig
from qfleet.training.evaluation import EvalConfig
from qfleet.transport.fleet_config import FleetConfig
from qfleet.transport.ray_config import RayConfig

RESUMABLE = frozenset({
    "total_steps", "total_updates", "stop_at", "device", "replay.max_bytes", "replay.store",
    "learner.capture", "placement", "actors", "cells",
    "allreduce.shard_optimizer", "allreduce.timeout_s", "allreduce.max_restarts",
    "server.shards", "server.copy_period_updates",
    *(f"fleet.{name}" for name in FleetConfig.model_fields),
    *(f"ray.{name}" for name in RayConfig.model_fields),
    *(f"eval.{name}" for name in EvalConfig.model_fields),
    *(f"checkpoint.{name}" for name in CheckpointConfig.model_fields),
    *(f"run.{name}" for name in RunSection.model_fields if name not in ("exact_resume", "root", "name")),
})
"""Keys that may change when a run goes on: how long, how judged, how kept and shown, but not what is learnt."""


EXACT_RESUME_KEYS = frozenset({
    "device", "replay.max_bytes", "replay.store", "learner.capture", "placement", "actors", "run.threads",
    "checkpoint.period_steps", "checkpoint.period_updates", "checkpoint.replay",
})
"""Of those, the ones that an exact resume must keep: they change the numbers, or where episodes are cut."""


def changed_on_resume(old: RunConfig, new: RunConfig) -> list[Difference]:
    """What a resumed run changes, all of it allowed; UserError with every key that may not change."""
    allowed = RESUMABLE - EXACT_RESUME_KEYS if old.run.exact_resume else RESUMABLE
    changes = diff(old, new)
    refused = [f"{change.key}: is {_yaml_word(change.b)}, but the run was started with {_yaml_word(change.a)}"
               for change in changes if change.key not in allowed]
    if refused:
        exact = " (the run promises run.exact_resume)" if old.run.exact_resume else ""
        remedy = "for anything else start a new run, with init_from=RUN to keep the weights"
        raise UserError("\n".join([*refused, f"a resumed run{exact} may change {_changeable(old, allowed)}; {remedy}"]))
    return changes


def _changeable(config: RunConfig, allowed: Collection[str]) -> str:
    """Keys that may change and have an effect, in few words: `run.* (except name)` for a section of many."""
    by_section: dict[str, list[str]] = {}
    for key in flatten(config).keys() - inactive_keys(config).keys():
        by_section.setdefault(key.rpartition(".")[0], []).append(key)
    words = []
    for section, keys in sorted(by_section.items()):
        may, not_ = ([key for key in sorted(keys) if (key in allowed) == wanted] for wanted in (True, False))
        whole = section and len(may) > max(2, len(not_))
        except_ = f" (except {', '.join(key.rpartition('.')[2] for key in not_)})" if not_ else ""
        words += [f"{section}.*{except_}"] if whole else may
    return ", ".join(words)
