"""Keys that may change when a run is resumed."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from qfleet.config import flatten, inactive_keys, read_yaml
from qfleet.config.layers import leaves
from qfleet.core.errors import UserError
from qfleet.runconfig.describe import Difference, _yaml_word, diff
from qfleet.runconfig.key_hints import REMOVED
from qfleet.runconfig.run_config import RunConfig
from qfleet.runs.directory import RunSection
from qfleet.training.checkpointer import CheckpointConfig
from qfleet.training.evaluation import EvalConfig
from qfleet.transport.fleet_config import FleetConfig
from qfleet.transport.ray_config import RayConfig

RESUMABLE = frozenset({
    "total_steps", "total_updates", "stop_at", "callbacks", "device", "replay.max_bytes", "replay.store",
    "learner.capture", "learner.schedule_updates", "actors", "learners", "launcher", "env.groups",
    "allreduce.shard_optimizer", "allreduce.timeout_s", "allreduce.max_restarts",
    "parameter_server.shards", "parameter_server.snapshot_period_updates",
    *(f"fleet.{name}" for name in FleetConfig.model_fields),
    *(f"ray.{name}" for name in RayConfig.model_fields),
    *(f"eval.{name}" for name in EvalConfig.model_fields),
    *(f"checkpoint.{name}" for name in CheckpointConfig.model_fields),
    *(f"run.{name}" for name in RunSection.model_fields if name not in ("exact_resume", "root", "name")),
})
"""Keys that may change on resume: duration, evaluation, storage and topology, but not what is learned."""


EXACT_RESUME_KEYS = frozenset({
    "device", "replay.max_bytes", "replay.store", "learner.capture", "learner.schedule_updates", "actors", "learners",
    "launcher", "env.groups", "run.threads", "eval.process",
    "checkpoint.period_steps", "checkpoint.period_updates", "checkpoint.replay",
})
"""Keys of RESUMABLE that an exact resume must keep: they change the results, or where episodes are truncated."""


def require_current(config: Path) -> None:
    """Raise UserError if the run of this config.yaml was started by a version whose keys no longer exist."""
    present = {name for name, _ in leaves(read_yaml(config))}
    if old := sorted(present & set(REMOVED)):
        raise UserError(f"{config.parent} was started by qfleet 0.1 ({', '.join(old[:3])} in its config.yaml), whose "
                        f"runs cannot be resumed; start a new run with its weights: init_from={config.parent}")


def changed_on_resume(old: RunConfig, new: RunConfig) -> list[Difference]:
    """Changes of a resumed run; raises UserError with every key that must not change."""
    allowed = RESUMABLE - EXACT_RESUME_KEYS if old.run.exact_resume else RESUMABLE
    changes = diff(old, new)
    rejected = [f"{change.key}: is {_yaml_word(change.b)}, but the run was started with {_yaml_word(change.a)}"
               for change in changes if change.key not in allowed]
    if rejected:
        exact = " (with run.exact_resume=true)" if old.run.exact_resume else ""
        remedy = "for anything else start a new run, with init_from=RUN to keep the weights"
        summary = f"a resumed run{exact} may change {_changeable(old, allowed)}; {remedy}"
        raise UserError("\n".join([*rejected, summary]))
    return changes


def _changeable(config: RunConfig, allowed: Collection[str]) -> str:
    """Active keys that may change, abbreviated: `run.* (except name)` for a section of many."""
    by_section: dict[str, list[str]] = {}
    for key in flatten(config).keys() - inactive_keys(config).keys():
        by_section.setdefault(key.rpartition(".")[0], []).append(key)
    words = []
    for section, keys in sorted(by_section.items()):
        changeable, fixed = ([key for key in sorted(keys) if (key in allowed) == wanted] for wanted in (True, False))
        whole = section and len(changeable) > max(2, len(fixed))
        except_ = f" (except {', '.join(key.rpartition('.')[2] for key in fixed)})" if fixed else ""
        words += [f"{section}.*{except_}"] if whole else changeable
    return ", ".join(words)
