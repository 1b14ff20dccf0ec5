"""Resolution of a recipe, a file or an environment id to the config of a run.

Layers, later ones override earlier ones: section defaults, the recipe (and those it extends), the user's file, the
command line. `Resolved` records for every key the layer that set it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import reduce
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from qfleet import algos, envs
from qfleet.config import (
    Layered,
    build_config,
    kinds_of,
    nest,
    not_a_recipe,
    read_yaml,
    without,
)
from qfleet.config.objects import is_object
from qfleet.core.env import EnvSpec
from qfleet.core.errors import UserError
from qfleet.envs import EnvConfig
from qfleet.envs.isolated import make_isolated_env
from qfleet.runconfig.rules import action_mismatch
from qfleet.runconfig.run_config import ALGO, RunConfig

RECIPES = Path(__file__).parents[1] / "recipes"
COMMAND_LINE = "command line"
KEYWORDS = "keyword"
"""Source name of keyword arguments of the Python API."""

SETTINGS = "config"
"""Source name of values given as nested settings by a script."""

EXCLUSIVE_KEYS = (
    ("eval.period_steps", "eval.period_updates"), ("checkpoint.period_steps", "checkpoint.period_updates"))
"""Two units for one schedule: setting one in a later layer clears the other."""

HINTS = {
    "lr": "learner.learning_rate", "batch": "learner.batch_size", "max_grad_norm": "learner.clip_norm",
    "lr_schedule": "learner.schedule", "lr_scheduler": "learner.schedule", "warmup_steps": "learner.warmup_updates",
    "target_update_interval": "learner.target_period_updates", "tau": "learner.target_tau",
    "target_network_frequency": "learner.target_period_updates",
    "n_envs": "env.lanes", "num_envs": "env.lanes", "env_id": "env.id",
    "buffer_size": "replay.capacity", "learning_starts": "replay.min_steps", "prioritized": "replay.alpha",
    "replay_ratio": "replay.samples_per_insert", "train_freq": "replay.samples_per_insert",
    "timesteps": "total_steps", "total_timesteps": "total_steps", "steps": "total_steps", "n_timesteps": "total_steps",
    "exploration_fraction": "explore.steps", "exploration_final_eps": "explore.end", "frame_stack": "env.stack",
    "eval_freq": "eval.period_steps", "n_eval_episodes": "eval.episodes", "save_freq": "checkpoint.period_steps",
}
"""Names in other libraries -> keys of this config, for the did-you-mean."""


REMOVED = {
    "agent.normalise": "was replaced in 0.2.0 by normalise.observations, for every agent",
    "learner.parts": "was removed in 0.2.0: batches are no longer split; delete it, and set run.threads=1 where "
                     "other processes keep cores busy",
    "run.share_cores": "was removed in 0.2.0; delete it, and set run.threads=1 where other processes keep cores busy",
    "placement": "was replaced in 0.2.0: placement=inline is the default (env.groups=N instead of actors=N), "
                 "placement=processes is actors=N, placement=ray is launcher=ray with actors=N",
    "gradients": "was renamed in 0.2.0: gradients=solo, allreduce or server is sync=none, allreduce or server",
    "cells": "was renamed in 0.2.0 to learners; actors=N per cell is env.groups=N",
    "server": "was renamed in 0.2.0: the section is parameter_server, and copy_period_updates in it is "
              "snapshot_period_updates",
} | {
    old: f"was renamed in 0.2.0 to {new}" for old, new in {
        "eval.beside": "eval.process", "explore.base": "explore.epsilon", "explore.alpha": "explore.steepness",
        "fleet.restarts": "fleet.learner_restarts", "fleet.max_restarts": "fleet.actor_restarts",
        "fleet.patience_s": "fleet.reconnect_timeout_s", "ray.cell_cpus": "ray.learner_cpus",
        "ray.cell_gpus": "ray.learner_gpus", "ray.cell_memory_mb": "ray.learner_memory_mb",
        "ray.cell_resources": "ray.learner_resources", "ray.cell_anywhere": "ray.learner_any_node",
    }.items()
}
"""Keys of version 0.1 -> what replaces them."""

NOT_PLAYED = (*REMOVED, "learner.capture")
"""Keys in checkpoints of older versions that this version may reject and that a trained agent does not need."""

TOPOLOGY_0_1 = ("actors", "allreduce", "fleet", "ray")
"""Keys whose meaning in version 0.1 depended on `placement` and `gradients`."""


def playable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a checkpoint of this or an older version, without keys that only training needs."""
    dropped = [*NOT_PLAYED, *(TOPOLOGY_0_1 if "placement" in settings else ())]
    return reduce(without, dropped, dict(settings))


@dataclass(frozen=True)
class Recipe:
    """One YAML file: its data, the recipe it extends, and the environments it suits."""

    source: str
    description: str
    extends: str | None
    suits: tuple[str, ...]
    data: dict[str, Any]


@dataclass(frozen=True)
class Resolved:
    """A config, and the source of the value of each dotted key."""

    config: RunConfig
    provenance: Mapping[str, str]


def read_recipe(path: Path, source: str) -> Recipe:
    """Read a recipe file: config keys plus `description`, `extends` and `suits`."""
    return _recipe(read_yaml(path), source)


def _recipe(data: dict[str, Any], source: str) -> Recipe:
    description, extends, suits = data.pop("description", ""), data.pop("extends", None), data.pop("suits", [])
    if not isinstance(description, str):
        raise UserError(f"{source}: description: must be text (got {description!r})")
    if extends is not None and not isinstance(extends, str):
        raise UserError(f"{source}: extends: must name one recipe or file (got {extends!r})")
    if not isinstance(suits, list) or not all(isinstance(pattern, str) for pattern in suits):
        raise UserError(f"{source}: suits: must be a list of patterns such as ['ALE/*'] (got {suits!r})")
    return Recipe(source, description, extends, tuple(suits), data)


def recipe_names() -> list[str]:
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def list_recipes(words: Iterable[str] = ()) -> list[tuple[str, str]]:
    """Name and one-line description of every built-in recipe, or of those that match all words."""
    wanted = [word.casefold() for word in words]
    return [(name, _packaged(name).description) for name in recipe_names()
            if all(word in _about(name) for word in wanted)]


def _about(name: str) -> str:
    """Searchable text of a recipe: its name, description, environment, algorithm and the recipes it extends."""
    chain = _chain(name, Path())
    layered = Layered(kinds_of(RunConfig))
    for recipe in chain:
        layered = layered.over(recipe.data, recipe.source)
    values = layered.merged()
    facts = [(values.get("env") or {}).get("id", ""), (values.get("agent") or {}).get("algo", "")]
    return " ".join([*(recipe.source for recipe in chain), chain[-1].description, *chain[-1].suits, *facts]).casefold()


def _packaged(name: str) -> Recipe:
    return read_recipe(RECIPES / f"{name}.yaml", f"recipe {name}")


def _is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml")) or (Path(name).is_file() and name not in recipe_names())


def _chain(name: str, folder: Path, above: tuple[str, ...] = ()) -> list[Recipe]:
    """A recipe or file by name and all that it extends, lowest first; relative file names start at `folder`."""
    if name.endswith(".py"):
        raise UserError(not_a_recipe(folder / name))
    if _is_file(name):
        path = folder / Path(name).expanduser()
        recipe, folder = read_recipe(path, name), path.parent
    else:
        recipe = _packaged(_known_recipe(name, above))
    return _with_extended(recipe, folder, above)


def _with_extended(recipe: Recipe, folder: Path, above: tuple[str, ...] = ()) -> list[Recipe]:
    """All that a recipe extends, and the recipe itself, lowest first."""
    if recipe.source in above:
        raise UserError(f"{recipe.source}: extends itself ({' -> '.join([*above, recipe.source])}); remove the cycle")
    below = _chain(recipe.extends, folder, (*above, recipe.source)) if recipe.extends else []
    return [*below, recipe]


def _known_recipe(name: str, above: tuple[str, ...]) -> str:
    names = recipe_names()
    plain = name.lower().replace("_", "-")
    if plain in names:
        return plain
    where = f"{above[-1]}: extends: " if above else ""
    if name and Path(name).is_dir():
        raise UserError(f"{where}{name!r} is a directory; name a recipe, a YAML file or an environment id, "
                        "or resume a run with `qfleet resume`")
    if absent := algos.NOT_IMPLEMENTED.get(plain.replace("-", "_")):
        raise UserError(f"{where}{name!r} is not a recipe: {absent}")
    close = get_close_matches(plain, names, 3, 0.6)
    guess = f"did you mean {' or '.join(close)}? " if close else ""
    raise UserError(f"{where}{name!r} is not a recipe, YAML file or environment id; {guess}`qfleet recipes` lists the "
                    "recipes; an environment id looks like CartPole-v1, ALE/Pong-v5 or module:Class")


def is_env_id(name: str) -> bool:
    """True if a name can only be an environment id: it ends with a version, or has a namespace or module."""
    return bool(re.search(r"-v\d+$", name) or ":" in name or ("/" in name and not Path(name).is_dir()))


def names_env(name: str) -> bool:
    """True if `resolve` takes a name as that of an environment."""
    return is_env_id(name) and not _is_file(name)


def recipe_for(env_id: str, spec: EnvSpec | None = None) -> str | None:
    """Recipe that suits an environment, by its id, else by its spec; None if the id is not enough.

    The name of an object says nothing: the environment may be wrapped in any way.
    """
    for name in recipe_names():
        if not is_object(env_id) and any(fnmatchcase(env_id, pattern) for pattern in _packaged(name).suits):
            return name
    if spec is None:
        return None
    seen = "pixels" if any(leaf.kind == "image" for leaf in spec.observation.values()) else "vector"
    return seen if spec.box is None else {"vector": "control", "pixels": "control-pixels"}[seen]


def _env_settings(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """The env section of layers, the last on top."""
    sections = [layer["env"] for layer in layers if isinstance(layer.get("env"), Mapping)]
    return {key: value for section in sections for key, value in section.items()}


def _suited_recipe(env_id: str, settings: Mapping[str, Any]) -> str:
    if name := recipe_for(env_id):
        return name
    try:
        cfg = EnvConfig.model_validate({**settings, "id": env_id})
    except (ValidationError, TypeError):
        return "vector"  # the whole config is validated next and reports this error with all others
    return recipe_for(env_id, env_spec_of(cfg)) or "vector"


def env_spec_of(cfg: EnvConfig) -> EnvSpec:
    """Spec of an environment, which is built for it; isolated if configured, since it may hang here as well."""
    env = (make_isolated_env(cfg.model_dump(mode="json"), 1, cfg.step_timeout_s, cfg.max_faults) if cfg.isolate
           else envs.make(cfg, 1))
    with closing(env):
        return env.spec


def resolve(name: str | Mapping[str, Any], overrides: Iterable[str] = (), file: str | Path | None = None,
            settings: Mapping[str, Any] | None = None) -> Resolved:
    """Config of a recipe, a YAML file, an environment id or nested settings.

    `file` is a further YAML file on top of it, then come nested `settings`, then `overrides`, `key=value` pairs."""
    user, settings = nest(overrides), settings or {}
    layered = Layered(kinds_of(RunConfig), EXCLUSIVE_KEYS)
    named: dict[str, Any] = {}
    if isinstance(name, Mapping):
        recipes = _with_extended(_recipe(dict(name), SETTINGS), Path())
    else:
        if names_env(name):
            named = {"env": {"id": name}}
            name = _suited_recipe(name, _env_settings(settings, user))
        recipes = _chain(name, Path())
    if file is not None:
        recipes += _chain(str(file), Path())
    for recipe in recipes:
        layered = layered.over(recipe.data, recipe.source)
    if named:
        layered = layered.over(named, COMMAND_LINE)
    below = layered
    if settings:
        layered = layered.over(settings, KEYWORDS)
    if user:
        layered = layered.over(user, COMMAND_LINE)
    try:
        return Resolved(*build_config(RunConfig, layered, HINTS | REMOVED))
    except UserError as error:
        if cause := _action_kind_mismatch(below.merged(), layered.merged()):
            raise UserError(f"{cause}\n{error}") from None
        raise


def _action_kind_mismatch(below: Mapping[str, Any], values: Mapping[str, Any]) -> str | None:
    """Message if the contradictions stem from an algorithm for another kind of actions than the recipe's, or None."""
    old, new = (ALGO.model(data.get("agent")) for data in (below, values))
    if old is None or new is None or getattr(old, "continuous", False) == getattr(new, "continuous", False):
        return None
    with suppress(Exception):  # an environment that cannot be built is reported later
        agent = new.model_validate({"algo": values["agent"]["algo"]})
        return action_mismatch(agent, env_spec_of(EnvConfig.model_validate(values["env"])))
    return None
