"""Tables of docs/results.md: what was trained, how many seeds reached the threshold, and published scores."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import evidence
import suite_tables
from learn import HEADS, MATRIX, TORSOS, command_of
from suite_tables import short
from tables import Cell, number, read, table

from qfleet.runconfig.resolution import recipe_names

Row = Sequence[Cell]
Run = dict[str, Any]
NONE = "–"
PONG_GOAL = 18
PUBLISHED = json.loads((Path(__file__).parent / "published.json").read_text())
NAMES = {
    "cartpole": "CartPole, unchanged", "cartpole one-step": "one-step returns",
    "cartpole single": "no double Q-learning", "cartpole dueling": "dueling network",
    "cartpole prioritised": "prioritised replay", "cartpole ladder": "fixed ε per lane",
    "cartpole hard target": "hard target updates", "cartpole mse": "squared error",
    "cartpole rescaled": "value rescaling", "cartpole layer norm": "LayerNorm", "cartpole rmsprop": "RMSProp",
    "cartpole noisy": "noisy networks",
    "cartpole munchausen": "Munchausen", "cartpole c51": "C51", "cartpole hlgauss": "HL-Gauss", "cartpole qr": "QR-DQN",
    "cartpole iqn": "IQN", "cartpole rainbow": "Rainbow", "cartpole btr": "BTR",
    "catch": "Catch, unchanged", "catch pixels": "Catch, pixels, fp32", "catch pixels bf16": "Catch, pixels, bf16",
    "pendulum": "Pendulum, DDPG", "pendulum td3": "Pendulum, TD3", "pendulum d4pg": "Pendulum, D4PG",
    "mountain car continuous": "MountainCarContinuous, TD3",
    "agent57 (before 0.2)": "agent57 (0.1)", "agent57 (before 0.2, cut off)": "agent57 (0.1, stopped early)",
    "agent57 (10 + 20)": "agent57 (sequences 10+20)", "agent57 (beta 0.3)": "agent57 (β = 0.3)"}
"""Labels of rows whose name does not say what they are."""
PROCESS_NAMES = {
    "cartpole": "one process", "cartpole processes": "2 actor processes", "cartpole ray": "2 actors on Ray",
    "cartpole 2 ranks": "2 learners, `sync=allreduce`", "cartpole server": "3 learners, `sync=server`",
    "cartpole server compensated": "the same, delay compensation",
    "cartpole server outliers": "the same, outlier filter", "catch processes": "Catch, 2 actor processes"}
TOPOLOGIES = tuple(name for name in PROCESS_NAMES if name != "cartpole")
MEMORY_TASKS = {"memory cue 10": "MemoryCue-10", "memory cue 40": "MemoryCue-40", "t-maze": "T-maze",
                "hidden cartpole": "HiddenCartPole", "deep sea 20": "DeepSea-20"}
PLACE_NAMES = {"inline": "in the learner's process", "processes": "processes on the host",
               "tcp+tls": "connected over TCP with TLS"}


table("suite.jsonl")(suite_tables.rows)


# -- The learning matrix -----------------------------------------------------------------------------------------------

def reached(name: str, runs: Sequence[Run]) -> list[Run]:
    """Runs of a row of the learning matrix that reached its threshold."""
    return [run for run in runs if run["mean_reward"] >= MATRIX[name][1]]


def of(part: Sequence[Any], whole: Sequence[Any]) -> str:
    """`3/5`, in bold if it is all."""
    text = f"{len(part)}/{len(whole)}"
    return f"**{text}**" if len(part) == len(whole) else text


def scores(runs: Iterable[float]) -> str:
    """Mean score and, of several, the worst."""
    values = list(runs)
    worst = f" ({short(min(values))})" if len(values) > 1 else ""
    return f"{short(statistics.fmean(values))}{worst}"


def outcome(name: str, runs: Sequence[Run]) -> tuple[str, str, str, str]:
    """Solved seeds, their median steps, mean score and median seconds of a row of the learning matrix."""
    solved = reached(name, runs)
    steps = number(statistics.median(run["steps"] for run in solved)) if solved else NONE
    return (of(solved, runs), steps, scores(run["mean_reward"] for run in runs),
            number(statistics.median(run["seconds"] for run in runs)))


def goal_of(name: str) -> str:
    return short(MATRIX[name][1])


def toy_rows(data: dict[str, Any]) -> list[str]:
    """Rows of learn.json on CartPole and Catch that vary the agent."""
    small = {f"catch {torso} {head}" for torso in TORSOS for head in HEADS}
    return [name for name in data["rows"] if name in MATRIX and name.startswith(("cartpole", "catch"))
            and name not in small and name not in TOPOLOGIES]


@table("learn.json", "toy")
def toy(data: dict[str, Any]) -> Iterator[Row]:
    yield "agent", "solved", "steps", "score (worst)", "seconds"
    for name in toy_rows(data):
        yield NAMES.get(name, name), *outcome(name, data["rows"][name])


@table("learn.json", "pixels")
def pixels(data: dict[str, Any]) -> Iterator[Row]:
    yield "agent", "networks", "solved", "steps"
    for head in HEADS:
        names = [name for torso in TORSOS if (name := f"catch {torso} {head}") in data["rows"]]
        runs = [run for name in names for run in data["rows"][name]]
        solved = [run for name in names for run in reached(name, data["rows"][name])]
        yield f"`{head}`", len(names), of(solved, runs), number(statistics.median(run["steps"] for run in solved))


@table("learn.json", "topologies")
def topologies(data: dict[str, Any]) -> Iterator[Row]:
    yield "processes", "solved", "steps", "score (worst)", "seconds"
    for name in PROCESS_NAMES:
        if name in data["rows"]:
            yield PROCESS_NAMES[name], *outcome(name, data["rows"][name])


@table("learn.json", "topology commands")
def topology_commands(data: dict[str, Any]) -> Iterator[Row]:
    yield "processes", "command"
    for name in TOPOLOGIES:
        if name in data["rows"]:
            yield PROCESS_NAMES[name], f"`{command_of(name)}`"


@table("learn_chain.json")
def chain(data: dict[str, Any]) -> Iterator[Row]:
    yield "actors", "variants", "solved"
    for place, words in PLACE_NAMES.items():
        found = {name: runs for name, runs in data["rows"].items() if name in MATRIX and name.endswith(f" {place}")}
        solved = [run for name, runs in found.items() for run in reached(name, runs)]
        yield words, len(found), of(solved, [run for runs in found.values() for run in runs])


@table("learn_memory.json")
def memory(data: dict[str, Any]) -> Iterator[Row]:
    yield "task (threshold)", "agent", "solved", "steps", "score (worst)", "seconds"
    for task, label in MEMORY_TASKS.items():
        for name, runs in data["rows"].items():
            if name.partition(",")[0] == task:
                agent = "DQN" if name.endswith(", dqn") else f"`{MATRIX[name][0]}`"
                yield f"{label} ({goal_of(name)})", agent, *outcome(name, runs)


# -- Continuous control ------------------------------------------------------------------------------------------------

RETURNS = (("HalfCheetah-v5", "continuous_returns.json"), ("Hopper-v5", "hopper.json"),
           ("Walker2d-v5", "walker2d.json"))
CONTENDERS = {"qfleet_td3": "TD3", "qfleet_ddpg": "DDPG", "stable_baselines3_td3": "SB3 TD3",
              "stable_baselines3_ddpg": "SB3 DDPG"}


@table("learn_control.json")
def classic_control(data: dict[str, Any]) -> Iterator[Row]:
    """Rows of Pendulum and MountainCarContinuous; the older ones of two files are left out."""
    yield "task (threshold)", "solved", "steps", "score (worst)", "seconds"
    rows = data["rows"] | {name: runs for name, runs in read("learn.json")["rows"].items()
                           if name.startswith("pendulum")}
    for name, runs in sorted(rows.items(), reverse=True):
        yield f"{NAMES.get(name, name)} ({goal_of(name)})", *outcome(name, runs)


@table("continuous_returns.json", "mujoco")
def mujoco(_: dict[str, Any]) -> Iterator[Row]:
    yield "task", "agent", "seeds", "steps", "score (worst)", "CPU minutes", "published (steps)"
    for env, file in RETURNS:
        for name, runs in read(file)["rows"].items():
            yield (env, CONTENDERS[name], len(runs), max(run["steps"] for run in runs),
                   scores(run["mean_reward"] for run in runs),
                   number(statistics.median(run["cpu_seconds"] for run in runs) / 60), published(file, name))


def published(file: str, name: str) -> str:
    """Published scores of the agent of a row, with the length of its training; published.json names the papers."""
    found = [row for row in PUBLISHED if row["ours"] == [file, name] and row["score"] is not None]
    return "; ".join(f"{short(row['score'])} ({row['length']})" for row in found) or NONE


# -- Atari -------------------------------------------------------------------------------------------------------------

@table("pong_family.json", "pong")
def pong(data: dict[str, Any]) -> Iterator[Row]:
    yield "recipe", f"≥ {PONG_GOAL}", "decisions", "minutes", "score (worst)", "published (decisions)"
    fast = evidence.fast_runs()
    yield pong_row("pong-fast", [run["games"]["mean_reward"] for run in fast], fast, "solved_s",
                   published("fast_speed.jsonl", "pong-fast"))
    for name, runs in read("precision.json")["rows"].items():
        yield pong_row(f"pong, {name}", [run["final"] for run in runs], runs, "seconds",
                       published("precision.json", name))
    names = sorted((name for name in data["rows"] if newest(name, data["rows"])), key=lambda name: name.split()[0])
    yield from (family_row(name, data["rows"][name]) for name in names)


def newest(name: str, rows: dict[str, Run]) -> bool:
    """Whether a run has the current settings of its recipe, or the recipe has no such run."""
    recipe = name.partition(" (")[0]
    return name == recipe or recipe not in rows


def family_row(name: str, row: Run) -> tuple[str, ...]:
    """A run of pong_family.json: the games of its best policy, or what training returned last."""
    games = row.get("games")
    last = games["mean_reward"] if games else row["training"][-1][1] if row["training"] else None
    found = pong_row(name, [] if last is None else [last], [row], "seconds", published("pong_family.json", name))
    return found if games else (*found[:4], f"{found[4]} (training)", found[5])


def pong_row(name: str, found: list[float], runs: list[Run], clock: str, theirs: str) -> tuple[str, ...]:
    good = [score for score in found if score >= PONG_GOAL]
    return (NAMES.get(name, name), of(good, runs), number(statistics.median(run["steps"] for run in runs)),
            number(statistics.median(run[clock] for run in runs) / 60, 1), scores(found) if found else NONE, theirs)


@table("sources_games.json", "games")
def games(data: dict[str, Any]) -> Iterator[Row]:
    yield "game", "agent", "decisions", "score", "published (decisions)"
    for name, row in data["rows"].items():
        game, agent = name.split()
        yield (game, "double" if agent == "double" else "prioritised", row["steps"],
               short(row["games"]["mean_reward"]), published("sources_games.json", name))


@table("sources_figures.json", "figures")
def source_figures(data: dict[str, Any]) -> Iterator[Row]:
    yield "settings", "decisions", "updates", "minutes", "last evaluation", "best evaluation"
    for name, row in data["rows"].items():
        found = [score for _, score, _ in row["curve"]]
        yield (name, row["steps"], row["updates"], number(row["seconds"] / 60), *(
            (short(found[-1]), short(max(found))) if found else (NONE, NONE)))


# -- Recipes and provenance --------------------------------------------------------------------------------------------

@table("learn.json", "recipes")
def recipes(_: dict[str, Any]) -> Iterator[Row]:
    """Recipes by how they were trained here."""
    rows = list(evidence.rows())
    plain = {row.recipe for row in rows if evidence.as_it_is(row.settings)} | evidence.suite_recipes()
    changed = {row.recipe for row in rows} - plain
    parts = {"with their own settings": plain, "with other settings only": changed,
             "not trained to a result": set(recipe_names()) - plain - changed}
    yield "trained on this page", "recipes"
    for what, names in parts.items():
        yield what, ", ".join(f"`{name}`" for name in recipe_names() if name in names)


FILES = ("suite.jsonl", "learn.json", "learn_memory.json", "learn_control.json", "learn_chain.json",
         "fast_speed.jsonl", "precision.json", "pong_family.json", "sources_games.json",
         "continuous_returns.json", "hopper.json", "walker2d.json")


@table("learn.json", "machines")
def machines(_: dict[str, Any]) -> Iterator[Row]:
    """Machines and versions with the files that were recorded there; of several calls the newest."""
    found: dict[tuple[str, str], list[str]] = {}
    for file in FILES:
        machine = machine_of(file)
        where = ", ".join(part for part in (machine.get("gpu"), f"{machine['cores']} cores of {machine['cpu']}",
                                            f"Python {machine['python']}") if part)
        versions = machine["versions"]
        key = where, ", ".join(f"{name} {versions[name]}" for name in ("torch", "gymnasium") if name in versions)
        found.setdefault(key, []).append(f"[{file}](../benchmarks/results/{file})")
    yield "machine", "versions", "files"
    for (where, versions), files in found.items():
        yield where, versions, ", ".join(files)


def machine_of(file: str) -> dict[str, Any]:
    if file == "fast_speed.jsonl":
        return evidence.fast_runs()[-1]
    data = read(file)
    newest: dict[str, Any] = data[-1]["machine"] if isinstance(data, list) else data["machine"]
    return newest
