"""What the committed results say of each recipe: which rows train it, with which settings, by which agent, how well."""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import continuous_returns
import old_keys
import precision
from learn import JOINED, MATRIX

from qfleet.config import flatten
from qfleet.runconfig.resolution import recipe_for, recipe_names, resolve
from qfleet.runconfig.run_config import RunConfig

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
UNTOLD = ("checkpoint.", "run.", JOINED)
"""Settings of where files lie and who plays: they change nothing that is learnt."""

ALGOS = {"dqn": "DQN", "c51": "C51", "hlgauss": "HL-Gauss", "qr": "QR-DQN", "iqn": "IQN", "r2d2": "R2D2",
         "ngu": "NGU", "agent57": "Agent57", "ddpg": "DDPG", "d4pg": "D4PG"}


@dataclass(frozen=True)
class Row:
    """One row of a result file: what was trained, and what came of it in a few words."""

    file: str
    name: str
    settings: tuple[str, ...]
    """A recipe or environment, and what was set over it, with the keys of this version."""
    outcome: str
    solved: int = 0
    runs: int = 0
    """How many runs there are, and how many reached a threshold; 0 where there is none."""

    @property
    def recipe(self) -> str:
        return suited(self.settings[0])


def rows() -> Iterator[Row]:
    """All rows of docs/results.md that trained something of ours, failures included."""
    for path in sorted(RESULTS.glob("learn*.json")):
        for name, runs in json.loads(path.read_text())["rows"].items():
            if name in MATRIX:
                recipe, goal, words = MATRIX[name]
                solved = sum(run["mean_reward"] >= goal for run in runs)
                yield Row(path.name, name, (recipe, *words), f"{solved} of {len(runs)} runs reached {goal:g}",
                          solved, len(runs))
    for file in ("pong_family.json", "sources_games.json", "sources_figures.json", "precision.json", "fast_speed.jsonl",
                 "continuous_returns.json", "hopper.json", "walker2d.json"):
        for name in names_of(file):
            if (settings := settings_of(file, name)) is not None:
                yield Row(file, name, settings, outcome(file, name))


def names_of(file: str) -> list[str]:
    if not (RESULTS / file).exists():
        return []
    return ["pong-fast"] if file.endswith(".jsonl") else list(read(file)["rows"])


def outcome(file: str, name: str) -> str:
    found = runs_of(file, name)
    if not found:
        return "was not evaluated"
    scores, steps = [score for score, _ in found], max(steps for _, steps in found)
    return f"{figure(statistics.fmean(scores))} after {steps:,} decisions"


def settings_of(file: str, name: str) -> tuple[str, ...] | None:
    """Recipe and settings of a row, with the keys of this version; None if it is not ours."""
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
    """The version of qfleet that recorded a run; 0.1 did not write it down."""
    return str(run.get("version", old_keys.OLD))


def in_new_keys(run: dict[str, Any]) -> tuple[str, ...]:
    """Recipe and settings of a run, with the keys of this version."""
    recipe, *words = run["settings"]
    return (recipe, *(old_keys.renamed(words) if version_of(run) == old_keys.OLD else words))


def command_of(run: dict[str, Any]) -> str:
    """The command of a run as it was recorded, with the settings that `changed` tells."""
    recipe, *words = run["settings"]
    told = set(changed(in_new_keys(run)))
    last = {word.partition("=")[0]: (word, new) for word, new in zip(words, in_new_keys(run)[1:], strict=True)}
    return " ".join(["qfleet train", recipe, *(quoted(word) for word, new in last.values() if new in told)])


def old_commands() -> set[str]:
    """Commands of docs/results.md that 0.1 recorded: this version need not take them."""
    runs = [run for found in read("pong_family.json")["rows"].values() for run in runs_in(found)]
    return {command_of(run) for run in runs if version_of(run) == old_keys.OLD}


def changed(settings: tuple[str, ...]) -> list[str]:
    """Of the settings over a recipe, those that say something else than it, each once; but for those of files."""
    recipe, *words = settings
    last = {word.partition("=")[0]: word for word in words}
    env = [word for word in (last.get("env.id"),) if word]  # without one, some recipes are not whole
    plain, ours = (flatten(configured((recipe, *some))) for some in (env, words))
    return [word for key, word in last.items() if not key.startswith(UNTOLD)
            and (word in env or plain.get(key) != ours.get(key) or key not in ours)]


def as_it_is(settings: tuple[str, ...]) -> bool:
    """But for how it is judged, how long it goes on, and the precision, which otherwise the hardware decides."""
    free = ("eval.", "stop_at", "total_steps", "learner.precision")
    return settings[0] in recipe_names() and all(word.startswith(free) for word in changed(settings))


def agent_of(settings: tuple[str, ...]) -> str:
    """The agent that settings make, in a few words: DQN, double, dueling, 3 steps, LayerNorm, prioritised."""
    config = configured(settings)
    agent: Any = config.agent
    name = "TD3" if getattr(agent, "twin", False) else ALGOS.get(agent.algo, agent.algo)
    told = [name, *(word for word in ("double", "munchausen", "dueling", "noisy") if getattr(agent, word, False))]
    traced = getattr(agent, "targets", None) == "retrace"
    told += ["Retrace"] if traced else [f"{agent.n_step} step{'s' * (agent.n_step > 1)}"]
    told += [f"sequences of {agent.burn_in} + {agent.unroll}"] if getattr(agent, "unroll", 0) else []
    told += ["LayerNorm"] if agent.norm == "layer" else []
    told += ["prioritised"] if config.replay.alpha else []
    told += [config.learner.precision] if config.learner.precision != "auto" else []
    return ", ".join(told)


@functools.cache
def configured(settings: tuple[str, ...]) -> RunConfig:
    return resolve(settings[0], [word for word in settings[1:] if word != JOINED]).config


@functools.cache
def suited(name: str) -> str:
    """A recipe by its name, or the one of an environment."""
    return name if name in recipe_names() else recipe_for(name) or "vector"


def runs_of(file: str, name: str) -> list[tuple[float, int]]:
    """Score and steps of every seed of a row; none if one of them was never judged."""
    if not (RESULTS / file).exists():
        return []
    if file.endswith(".jsonl"):
        return [(run["games"]["mean_reward"] if isinstance(run.get("games"), dict) else run["judged"][-1][2],
                 run["steps"]) for run in fast_runs() if run["judged"]]
    runs = runs_in(read(file)["rows"].get(name, []))
    if all("games" in run for run in runs):
        return [(run["games"]["mean_reward"], run["steps"]) for run in runs]
    if all("mean_reward" in run for run in runs):
        return [(run["mean_reward"], run["steps"]) for run in runs]
    curves = [run["evaluations"] if "evaluations" in run else run["curve"] for run in runs]
    count = min(len(curve) for curve in curves)
    return [(curve[count - 1][1], curve[count - 1][0]) for curve in curves] if count else []


def commits_of(file: str) -> str:
    """Of which commits the code of a file's rows was, as far as it was written down."""
    document = {"rows": {"": fast_runs()}, "machine": {}} if file.endswith(".jsonl") else read(file)
    runs = [run for found in document["rows"].values() for run in runs_in(found)]
    if not any("commit" in run for run in runs):  # all of one call, or of a time when nobody wrote it down
        return document["machine"].get("commit") or "not recorded"
    return ", ".join(dict.fromkeys(run.get("commit") or "not recorded" for run in runs))


def runs_in(found: Any) -> list[dict[str, Any]]:
    """One run, or one for each seed."""
    return found if isinstance(found, list) else [found]


def fast_runs() -> list[dict[str, Any]]:
    """The newest runs of `pong-fast` as it is, one for each seed."""
    records = [json.loads(line) for line in (RESULTS / "fast_speed.jsonl").read_text().splitlines()]
    runs = {run["seed"]: run for run in records if run["kind"] == "pong" and run.get("recipe") == "pong-fast"
            and not run["set"]}
    return list(runs.values())


@functools.cache
def read(file: str) -> Any:
    return json.loads((RESULTS / file).read_text())


def quoted(word: str) -> str:
    return f"'{word}'" if any(letter in word for letter in " {}[]") else word


def figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
