"""The whole config of a run, and how a recipe, a file or an environment id becomes one.

Layers, later ones over earlier ones: the defaults of the sections, the recipe (and those it extends), the user's
file, the command line. `Resolved` remembers for every key which of them spoke last.
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
from qfleet.core.env import EnvSpec
from qfleet.core.errors import UserError
from qfleet.envs import EnvConfig
from qfleet.envs.isolated import make_isolated_env
from qfleet.runconfig.rules import action_mismatch
from qfleet.runconfig.run_config import ALGO, RunConfig

RECIPES = Path(__file__).parents[1] / "recipes"
COMMAND_LINE = "command line"
SETTINGS = "config"
"""The source of values that a script gave as nested settings."""

EXCLUSIVE_KEYS = (
    ("eval.period_steps", "eval.period_updates"), ("checkpoint.period_steps", "checkpoint.period_updates"))
"""Two clocks for one schedule: naming one on the command line replaces the other of the recipe."""

HINTS = {
    "lr": "learner.learning_rate", "batch": "learner.batch_size", "max_grad_norm": "learner.clip_norm",
    "target_update_interval": "learner.target_period_updates", "tau": "learner.target_tau",
    "target_network_frequency": "learner.target_period_updates",
    "n_envs": "env.lanes", "num_envs": "env.lanes", "env_id": "env.id",
    "buffer_size": "replay.capacity", "learning_starts": "replay.min_steps", "prioritized": "replay.alpha",
    "replay_ratio": "replay.samples_per_insert", "train_freq": "replay.samples_per_insert",
    "timesteps": "total_steps", "total_timesteps": "total_steps", "steps": "total_steps", "n_timesteps": "total_steps",
    "exploration_fraction": "explore.steps", "exploration_final_eps": "explore.end", "frame_stack": "env.stack",
    "eval_freq": "eval.period_steps", "n_eval_episodes": "eval.episodes", "save_freq": "checkpoint.period_steps",
}
"""Names known from other libraries -> ours, for the did-you-mean."""


REMOVED = {
    "learner.parts": "was removed in 0.2.0: batches are always learnt whole; delete it, and set run.threads=1 where "
                     "other processes keep cores busy",
    "run.share_cores": "was removed in 0.2.0; delete it, and set run.threads=1 where other processes keep cores busy",
}
"""Keys of older versions, and what to do instead."""

NOT_PLAYED = (*REMOVED, "learner.capture")
"""Keys that older versions wrote into checkpoints and this one may refuse; they do not matter to a trained agent."""


def playable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a checkpoint, of this version or an older one, without what only training needs."""
    return reduce(without, NOT_PLAYED, dict(settings))


@dataclass(frozen=True)
class Recipe:
    """One YAML file: its data, what it stands on, and the environments it is chosen for."""

    source: str
    description: str
    extends: str | None
    suits: tuple[str, ...]
    data: dict[str, Any]


@dataclass(frozen=True)
class Resolved:
    """A config, and for each dotted key where its value came from."""

    config: RunConfig
    provenance: Mapping[str, str]


def read_recipe(path: Path, source: str) -> Recipe:
    """A recipe file: the config's keys and, beside them, `description`, `extends` and `suits`."""
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
    """Name and one-line description of every recipe that comes with the package, or of those that have all words."""
    wanted = [word.casefold() for word in words]
    return [(name, _packaged(name).description) for name in recipe_names()
            if all(word in _about(name) for word in wanted)]


def _about(name: str) -> str:
    """What a search finds a recipe by: its name, description, environment and algorithm, and the recipes it extends."""
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
    """A recipe or file by name and all that it extends, lowest first; `folder` is where relative files lie."""
    if name.endswith(".py"):
        raise UserError(not_a_recipe(folder / name))
    if _is_file(name):
        path = folder / Path(name).expanduser()
        recipe, folder = read_recipe(path, name), path.parent
    else:
        recipe = _packaged(_known_recipe(name, above))
    return _with_lower(recipe, folder, above)


def _with_lower(recipe: Recipe, folder: Path, above: tuple[str, ...] = ()) -> list[Recipe]:
    """All that a recipe extends, and the recipe itself, lowest first."""
    if recipe.source in above:
        raise UserError(f"{recipe.source}: extends itself ({' -> '.join([*above, recipe.source])}); break the circle")
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
                        "or go on with a run by `qfleet resume`")
    if absent := algos.ABSENT.get(plain.replace("-", "_")):
        raise UserError(f"{where}{name!r} is no recipe: {absent}")
    close = get_close_matches(plain, names, 3, 0.6)
    guess = f"did you mean {' or '.join(close)}? " if close else ""
    raise UserError(f"{where}{name!r} is no recipe, YAML file or environment id; {guess}`qfleet recipes` lists the "
                    "recipes; an environment id looks like CartPole-v1, ALE/Pong-v5 or module:Class")


def is_env_id(name: str) -> bool:
    """Whether a name can only be an environment's: a version at its end, or a namespace or module before it."""
    return bool(re.search(r"-v\d+$", name) or ":" in name or ("/" in name and not Path(name).is_dir()))


def recipe_for(env_id: str, spec: EnvSpec | None = None) -> str | None:
    """The recipe that suits an environment: by its id, else by what it shows; None if only the spec could tell."""
    for name in recipe_names():
        if any(fnmatchcase(env_id, pattern) for pattern in _packaged(name).suits):
            return name
    if spec is None:
        return None
    seen = "pixels" if any(leaf.kind == "image" for leaf in spec.observation.values()) else "vector"
    return seen if spec.box is None else {"vector": "control", "pixels": "control-pixels"}[seen]


def _suited_recipe(env_id: str, user: Mapping[str, Any]) -> str:
    if name := recipe_for(env_id):
        return name
    try:
        cfg = EnvConfig.model_validate({**(user.get("env") or {}), "id": env_id})
    except (ValidationError, TypeError):
        return "vector"  # the whole config is checked next, and names this mistake together with all others
    return recipe_for(env_id, env_spec_of(cfg)) or "vector"


def env_spec_of(cfg: EnvConfig) -> EnvSpec:
    """What an environment shows. What may hang while it trains may hang while it is looked at."""
    env = (make_isolated_env(cfg.model_dump(mode="json"), 1, cfg.step_timeout_s, cfg.max_faults) if cfg.isolate
           else envs.make(cfg, 1))
    with closing(env):
        return env.spec


def resolve(name: str | Mapping[str, Any], overrides: Iterable[str] = (), file: str | Path | None = None) -> Resolved:
    """The config that a recipe, a YAML file or an environment id means, under a further file and `key=value` pairs.

    Nested settings, as a file has them, do as well.
    """
    user = nest(overrides)
    layered = Layered(kinds_of(RunConfig), EXCLUSIVE_KEYS)
    named: dict[str, Any] = {}
    if isinstance(name, Mapping):
        recipes = _with_lower(_recipe(dict(name), SETTINGS), Path())
    else:
        if is_env_id(name) and not _is_file(name):
            named = {"env": {"id": name}}
            name = _suited_recipe(name, user)
        recipes = _chain(name, Path())
    if file is not None:
        recipes += _chain(str(file), Path())
    for recipe in recipes:
        layered = layered.over(recipe.data, recipe.source)
    if named:
        layered = layered.over(named, COMMAND_LINE)
    below = layered
    if user:
        layered = layered.over(user, COMMAND_LINE)
    try:
        return Resolved(*build_config(RunConfig, layered, HINTS | REMOVED))
    except UserError as error:
        if cause := _of_other_actions(below.merged(), layered.merged()):
            raise UserError(f"{cause}\n{error}") from None
        raise


def _of_other_actions(below: Mapping[str, Any], values: Mapping[str, Any]) -> str | None:
    """What is behind other contradictions where the user changed the recipe's algorithm to one for other actions."""
    old, new = (ALGO.model(data.get("agent")) for data in (below, values))
    if old is None or new is None or getattr(old, "continuous", False) == getattr(new, "continuous", False):
        return None
    with suppress(Exception):  # an environment that cannot be made here is told later
        agent = new.model_validate({"algo": values["agent"]["algo"]})
        return action_mismatch(agent, env_spec_of(EnvConfig.model_validate(values["env"])))
    return None



























