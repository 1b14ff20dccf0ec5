"""What the committed results contain for each recipe: the rows that train it, with which settings and scores."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import continuous_returns
import old_keys
import precision
from learn import JOINED, MATRIX
from suite_cells import DEFAULT, RECIPE
from suite_tables import groups
from tables import read

from qfleet.config import flatten
from qfleet.envs import EnvConfig
from qfleet.runconfig.resolution import env_spec_of, recipe_for, recipe_names, resolve
from qfleet.runconfig.run_config import RunConfig

RESULTS = Path(__file__).parent / "results"
NOT_LEARNED = ("checkpoint.", "run.", JOINED)
"""Settings of files and processes, which change nothing that is learned."""


@dataclass(frozen=True)
class Row:
    """One row of a result file."""

    file: str
    name: str
    settings: tuple[str, ...]
    """A recipe or environment, and the settings over it, with the keys of this version."""

    @property
    def recipe(self) -> str:
        return suited(self.settings[0])


def rows() -> Iterator[Row]:
    """All rows of docs/results.md that qfleet trained, failures included, without those of the suite."""
    for path in sorted(RESULTS.glob("learn*.json")):
        for name in json.loads(path.read_text())["rows"]:
            if name in MATRIX:
                recipe, _, words = MATRIX[name]
                yield Row(path.name, name, (recipe, *words))
    for file in ("pong_family.json", "sources_games.json", "sources_figures.json", "precision.json",
                 "fast_speed.jsonl", "continuous_returns.json", "hopper.json", "walker2d.json"):
        for name in names_of(file):
            if (settings := settings_of(file, name)) is not None:
                yield Row(file, name, settings)


def names_of(file: str) -> list[str]:
    return ["pong-fast"] if file.endswith(".jsonl") else list(read(file)["rows"])


def settings_of(file: str, name: str) -> tuple[str, ...] | None:
    """Recipe and settings of a row, with the keys of this version; None if another library made it."""
    if file.endswith(".jsonl"):
        return (name,)
    document = read(file)
    if file == "precision.json":
        return ("pong", *precision.RECIPE, f"learner.precision={name}", *document["overrides"])
    if "env" in document:  # a file of continuous_returns.py
        plain = continuous_returns.PLAIN if name.endswith("ddpg") else []
        recipe = continuous_returns.RECIPES[document["env"]]
        return (recipe, *plain, *document["overrides"]) if name.startswith("qfleet") else None
    return in_new_keys(runs_in(document["rows"][name])[0])


def version_of(run: dict[str, Any]) -> str:
    """The version of qfleet that recorded a run; version 0.1 did not record it."""
    return str(run.get("version", old_keys.OLD))


def in_new_keys(run: dict[str, Any]) -> tuple[str, ...]:
    """Recipe and settings of a run, with the keys of this version."""
    recipe, *words = run["settings"]
    return (recipe, *(old_keys.renamed(words) if version_of(run) == old_keys.OLD else words))


def changed(settings: tuple[str, ...]) -> list[str]:
    """The settings that differ from those of the recipe, each once, without those of files and processes."""
    recipe, *words = settings
    last = {word.partition("=")[0]: word for word in words}
    env = [word for word in (last.get("env.id"),) if word]  # without one, some recipes are not complete
    plain, ours = (flatten(configured((recipe, *some))) for some in (env, words))
    return [word for key, word in last.items() if not key.startswith(NOT_LEARNED)
            and (word in env or plain.get(key) != ours.get(key) or key not in ours)]


def as_it_is(settings: tuple[str, ...]) -> bool:
    """Whether at most the evaluation, the length and the precision differ from a recipe."""
    free = ("eval.", "stop_at", "total_steps", "learner.precision")
    return settings[0] in recipe_names() and all(word.startswith(free) for word in changed(settings))


@functools.cache
def configured(settings: tuple[str, ...]) -> RunConfig:
    return resolve(settings[0], [word for word in settings[1:] if word != JOINED]).config


def suite_recipes() -> set[str]:
    """Recipes that suite.jsonl trained with their own settings, on the environments of its tasks."""
    sources = {group.runs[-1]["settings"]["source"] for (_, contender), group in groups(read("suite.jsonl")).items()
               if contender in (DEFAULT, RECIPE) and group.done}
    return {name for source in sources if (name := chosen_for(source))}


def chosen_for(source: str) -> str | None:
    """A recipe by its name, or the one that an environment gets by its id or its spaces."""
    if source in recipe_names():
        return source
    return recipe_for(source) or recipe_for("", env_spec_of(EnvConfig(id=source)))


@functools.cache
def suited(name: str) -> str:
    """A recipe by its name, or the one of an environment."""
    return name if name in recipe_names() else recipe_for(name) or "vector"


def runs_in(found: Any) -> list[dict[str, Any]]:
    """One run, or one for each seed."""
    return found if isinstance(found, list) else [found]


def fast_runs() -> list[dict[str, Any]]:
    """The newest runs of `pong-fast` with its own settings, one for each seed."""
    runs = {run["seed"]: run for run in read("fast_speed.jsonl")
            if run["kind"] == "pong" and run.get("recipe") == "pong-fast" and not run["set"]}
    return list(runs.values())
