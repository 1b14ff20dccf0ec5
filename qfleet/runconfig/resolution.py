"""Resolution of a recipe, a file or an environment id to the config of a run.

Layers, later ones override earlier ones: section defaults, the recipe (and those it extends), the user's file, the
command line. `Resolved` records for every key the layer that set it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import reduce
from itertools import takewhile
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from qfleet import algos, envs
from qfleet.algos.tabular import count_states
from qfleet.config import (
    Layered,
    build_config,
    kinds_of,
    nest,
    not_a_recipe,
    read_yaml,
    without,
)
from qfleet.config.objects import is_object, readable
from qfleet.core.env import EnvSpec, Leaf
from qfleet.core.errors import UserError
from qfleet.envs import EnvConfig
from qfleet.envs.isolated import make_isolated_env
from qfleet.runconfig.algorithm_settings import SEQUENCES, TABLE, AlgorithmChange, learns_from, name_of
from qfleet.runconfig.key_hints import HINTS, REMOVED
from qfleet.runconfig.rules import action_mismatch
from qfleet.runconfig.run_config import ALGO, RunConfig

RECIPES = Path(__file__).parents[1] / "recipes"
RECURRENT = "recurrent"
"""Recipe for recurrent agents with observations of any kind."""

TABULAR = "discrete"
"""Recipe for tables."""

COMMAND_LINE = "command line"
KEYWORDS = "keyword"
"""Source name of keyword arguments of the Python API."""

SETTINGS = "config"
"""Source name of values given as nested settings by a script."""

EXCLUSIVE_KEYS = (
    ("eval.period_steps", "eval.period_updates"), ("checkpoint.period_steps", "checkpoint.period_updates"))
"""Two units for one schedule: setting one in a later layer clears the other."""

NOT_PLAYED = (*REMOVED, "learner.capture")
"""Keys in checkpoints of older versions that this version may reject and that a trained agent does not need."""

IMAGE_RECIPES = ("pixels", "small-images", "control-pixels")
"""Recipes for environments with images."""

LARGE_PICTURE = 36
"""Pixels of the shorter side of a picture that the torso `nature` can read."""

LARGE_TABLE = 10_000
"""States for which the recipe for discrete observations uses a network instead of a table."""

SMALL_SIDE = 64
"""Pixels of the longer side of a board that the recipe for small images is for."""

TOPOLOGY_0_1 = ("actors", "allreduce", "fleet", "ray")
"""Keys whose meaning in version 0.1 depended on `placement` and `gradients`."""


WITHOUT_SYMBOLS = {"image_symbols": None}
"""Setting of checkpoints from before images of symbols were known."""


def playable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a checkpoint of this or an older version, without keys that only training needs."""
    dropped = [*NOT_PLAYED, *(TOPOLOGY_0_1 if "placement" in settings else ())]
    kept = reduce(without, dropped, dict(settings))
    return kept | {"env": {**WITHOUT_SYMBOLS, **kept["env"]}} if isinstance(kept.get("env"), Mapping) else kept


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
    note: str = ""
    """One line on recipe settings that were replaced to suit the algorithm or environment of the user."""


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
    values = _layered(chain).merged()
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
        recipe = _packaged(name)
        if recipe.suits and not is_object(env_id) and _suits(recipe, env_id):
            return name
    if spec is None:
        return None
    images = [leaf for leaf in spec.observation.values() if leaf.kind == "image"]
    if spec.box is not None:
        return "control-pixels" if images else "control"
    if not images:
        states = count_states(spec.observation)
        return TABULAR if states is not None and states < LARGE_TABLE else "vector"
    return "small-images" if all(map(_is_small, images)) else "pixels"


def _is_small(image: Leaf) -> bool:
    """True for boards, symbols and planes, and for pictures that are too small for the torso of larger ones."""
    is_picture = image.dtype == "uint8" and image.largest is None and not image.symbols
    size = image.shape[1:]
    return min(size) < LARGE_PICTURE if is_picture else max(size) <= SMALL_SIDE


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
    recipes, named = _recipes_of(name, file, _env_settings(settings, user))
    below = _layered(recipes).over(named, COMMAND_LINE) if named else _layered(recipes)
    layered = below.over(settings, KEYWORDS) if settings else below
    if user:
        layered = layered.over(user, COMMAND_LINE)
    layered, note = _fit_recipe(layered)
    try:
        resolved = Resolved(*build_config(RunConfig, layered, HINTS | REMOVED), note)
    except UserError as error:
        if cause := _action_kind_mismatch(below.merged(), layered.merged()):
            mistakes = [line for line in str(error).splitlines() if not line.startswith("recipe ")]
            raise UserError("\n".join([cause, *mistakes])) from None
        raise
    env_id = resolved.config.env.id
    if is_object(env_id) or not recipes or _suits(recipes[-1], env_id):
        return resolved
    hint = (f"{recipes[-1].source} is made for {', '.join(recipes[-1].suits)}: to train {env_id} with default "
            f"settings, run `qfleet train {env_id}`")
    return replace(resolved, note="\n".join(filter(None, [note, hint])))


def _recipes_of(name: str | Mapping[str, Any], file: str | Path | None,
                env: Mapping[str, Any]) -> tuple[list[Recipe], dict[str, Any]]:
    """The recipes of a name, of settings or of an environment id, with those of `file` on top; and what the id sets.

    `env` are the env settings of the user.
    """
    named: dict[str, Any] = {}
    if isinstance(name, Mapping):
        recipes = _with_extended(_recipe(dict(name), SETTINGS), Path())
    else:
        if names_env(name):
            named = {"env": {"id": name}}
            name = _suited_recipe(name, env)
        recipes = _chain(name, Path())
    if file is not None:
        recipes += _chain(str(file), Path())
    return recipes, named


def _layered(recipes: Iterable[Recipe]) -> Layered:
    layers = tuple((recipe.source, recipe.data) for recipe in recipes)
    return Layered(kinds_of(RunConfig), EXCLUSIVE_KEYS, layers)


def _fit_recipe(layered: Layered) -> tuple[Layered, str]:
    """The layers with recipe settings that suit the user's algorithm and environment, and a note on what was replaced.

    Values of the user are never replaced.
    """
    built_in = {f"recipe {name}" for name in recipe_names()}
    recipe, own = layered.split(len(list(takewhile(lambda layer: layer[0] in built_in, layered.layers))))
    if not recipe.layers or any(source in built_in for source, _ in own.layers):
        return layered, ""
    agent, env, note = _section(layered, "agent"), _section(layered, "env"), ""
    if learns_from(agent) == SEQUENCES and _lacks_images(recipe, _section(own, "env")):
        note = (f"{recipe.layers[-1][0]} is for images, and {readable(str(env['id']))} has none: recipe {RECURRENT} "
                f"replaces it, with agent.algo={name_of(agent)}")
        recipe = _layers_of(RECURRENT)
        layered = replace(recipe, layers=(*recipe.layers, *own.layers))
    change = AlgorithmChange.between(_section(recipe, "agent"), agent)
    if change is not None and (names := _recipes_for(change, env)):
        other = _layers_of(names[0])
        for source, data in (layer for name in names[1:] for layer in _layers_of(name).layers):
            other = other.over({"explore": data["explore"]} if "explore" in data else {}, source)
        layered = change.apply(recipe, other, own)
        note = note or change.describe(recipe, names, layered, own)
    return layered, note


def _section(layered: Layered, name: str) -> Mapping[str, Any]:
    section = layered.merged().get(name)
    return section if isinstance(section, Mapping) else {}


def _layers_of(name: str) -> Layered:
    """The layers of a built-in recipe."""
    return _layered(_chain(name, Path()))


def _is_atari(env: Mapping[str, Any]) -> bool:
    suited = recipe_for(str(env.get("id", "")))
    return suited is not None and any(source == "recipe atari" for source, _ in _layers_of(suited).layers)


def _spec_or_none(env: Mapping[str, Any]) -> EnvSpec | None:
    """Spec of an environment; None if it cannot be built, which is reported later."""
    with suppress(Exception):
        return env_spec_of(EnvConfig.model_validate(env))
    return None


def _lacks_images(recipe: Layered, env: Mapping[str, Any]) -> bool:
    """True if a recipe is for images and the environment of the user, if there is one, has none."""
    if "id" not in env or _is_atari(env) or all(source != "recipe pixels" for source, _ in recipe.layers):
        return False
    spec = _spec_or_none(env)
    return spec is not None and all(leaf.kind != "image" for leaf in spec.observation.values())


def _recipes_for(change: AlgorithmChange, env: Mapping[str, Any]) -> list[str]:
    """Names of recipes with settings for the chosen algorithm in an environment; none if it cannot act there.

    Only the exploration is taken from a second recipe: it may need as many arms as the agent has.
    """
    if change.data == TABLE:
        return [TABULAR]
    if change.data != SEQUENCES:
        name = "atari" if _is_atari(env) else recipe_for("", _spec_or_none(env)) or "vector"
        name = "vector" if name == TABULAR else name
        return [name] * (learns_from(_section(_layers_of(name), "agent")) == change.data)
    if _is_atari(env):
        return [change.new]
    if change.continuous and (spec := _spec_or_none(env)) is not None and spec.box is not None:
        return []
    known = name_of(_section(_layers_of(RECURRENT), "agent"))
    return [RECURRENT, *([change.new] if change.new != known else [])]


def _suits(recipe: Recipe, env_id: str) -> bool:
    """True unless a recipe names the environments that it suits, and this is not one of them."""
    return not recipe.suits or any(fnmatchcase(env_id, pattern) for pattern in recipe.suits)


def _action_kind_mismatch(below: Mapping[str, Any], values: Mapping[str, Any]) -> str | None:
    """Message if the contradictions stem from an algorithm for another kind of actions than the recipe's, or None."""
    old, new = (ALGO.model(data.get("agent")) for data in (below, values))
    if old is None or new is None or getattr(old, "continuous", False) == getattr(new, "continuous", False):
        return None
    with suppress(Exception):  # an environment that cannot be built is reported later
        agent = new.model_validate({"algo": values["agent"]["algo"]})
        return action_mismatch(agent, env_spec_of(EnvConfig.model_validate(values["env"])))
    return None
