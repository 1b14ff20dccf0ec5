"""Tables of docs/benchmarks.md: speed and other libraries, memory, the network, faults, and how cost grows."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import cost
from tables import Cell, number, percent, read, table

Row = Sequence[Cell]
Data = dict[str, Any]


# -- Speed -------------------------------------------------------------------------------------------------------------

@table("bench", "peers")
def peers(works: Data) -> Iterator[Row]:
    """Steps per CPU second of qfleet and of each peer, and the ratio."""
    yield "workload", "qfleet", "SB3", "ratio", "Tianshou", "ratio"
    for work, found in works.items():
        rates = {one["name"]: one["median"]["per_cpu_s"] for one in found["results"]}
        for one in (one for one in found["results"] if one["who"] == "qfleet"):
            cells: list[Cell] = [f"`{work}`{one['name'].removeprefix('qfleet')}", number(rates[one["name"]])]
            for peer in ("sb3", "tianshou"):
                pair = next(pair for pair in found["ratio"][work] if pair.startswith(f"{one['name']} / {peer}"))
                cells += [number(rates[pair.partition(" / ")[2]]), number(found["ratio"][work][pair]["per_cpu_s"], 2)]
            yield cells


@table("per.json", "parts")
def parts_of_training(data: Data) -> Iterator[Row]:
    """Sampling and acting compared with libraries that do only this."""
    yield "part of training", "qfleet", "other program", "ratio of speeds"
    yield ("sample 512 of a million steps, update priorities, µs", number(data["qfleet"]["both_us"]),
           f"cpprb {number(data['cpprb']['both_us'])}", number(data["ratio"], 1))
    acting = read("acting_speed.json")
    rates = {name: found["per_s"] for name, found in acting["median"].items()}
    yield ("play and store Pong, steps/s", number(rates["qfleet"]),
           f"bare emulators {number(rates['ale_random_actions'])}",
           number(acting["ratio"]["qfleet / ale_random_actions"]["per_s"], 2))


@table("foreign_load.json", "runs")
def busy_core(data: Data) -> Iterator[Row]:
    """What another process that keeps one core busy costs a run."""
    yield "recipe", "threads", "steps/s", "with a busy core", "slowdown"
    whole = ", learner.parts=1"  # of version 0.1, in which a batch could be learned in parts
    runs = {run["run"]: run for run in data["runs"]}
    for name, run in runs.items():
        if f"{name}{whole}" not in runs and "run.share_cores" not in name:
            recipe, _, more = name.removesuffix(whole).partition(", ")
            yield (f"`{recipe}`{more and f', {more}'}", run["threads"], number(run["quiet"]), number(run["busy"]),
                   number(run["slowdown"], 1))


SECTIONS = {"sample": ("sample",), "gather, decode": ("gather, decode",),
            "forward, loss, backward": ("forward, loss, backward", "forward, loss", "backward"),
            "optimizer": ("optimizer",)}


@table("bench/profile.json", "parts")
def profile(data: Data) -> Iterator[Row]:
    """CPU milliseconds of an update by section, and how many times the best possible time the section takes."""
    works = {work: {part["name"].partition(" (")[0]: part for part in found["parts"]}
             for work, found in data["profile"].items()}
    yield "section", *(f"`{work}`" for work in works)
    for label, names in SECTIONS.items():
        yield label, *(_cost([parts[name] for name in names if name in parts]) for parts in works.values())
    known = {name for names in SECTIONS.values() for name in names}
    yield "everything else", *(number(sum(part["cpu_ms"] for name, part in parts.items() if name not in known), 2)
                               for parts in works.values())


def _cost(parts: list[Data]) -> str:
    """CPU time of some sections, and its ratio to their best possible time, where that is known of all."""
    spent = sum(part["cpu_ms"] for part in parts)
    if not parts:
        return "–"
    if not all(part["distance"] for part in parts):
        return number(spent, 2)
    return f"{number(spent, 2)} ({number(spent / sum(part['cpu_ms'] / part['distance'] for part in parts), 1)}×)"


# -- Memory, network, faults -------------------------------------------------------------------------------------------

@table("replay_memory.json", "games")
def replay_memory(data: Data) -> Iterator[Row]:
    """The mean of all games, and those with the smallest and the largest replay."""
    games = sorted(data["games"], key=lambda game: game["gb_per_million"])
    times = [game["sample_ms"] for game in games]
    yield "game", "replay, GB", "batch of 32, ms"
    for label, game in (("smallest", games[0]), ("largest", games[-1])):
        yield (f"{label}: {game['game'].replace('_', ' ').title()}", number(game["gb_per_million"], 2),
               number(game["sample_ms"], 1))
    yield f"mean of {len(games)} games", number(data["mean_gb_per_million"], 2), number(statistics.fmean(times), 1)


@table("steady_memory.json", "process")
def steady_memory(data: Data) -> Iterator[Row]:
    yield "recipe", "start, MB", "end, MB"
    for name, row in data["rows"].items():
        yield f"`{name}`", *(number(row[key]) for key in ("first_mb", "last_mb"))


@table("wire.json", "quantities")
def wire(data: Data) -> Iterator[Row]:
    """Medians of the transfers and means of the games, the worst of them, and the goals."""
    yield "measurement", "typical", "worst", "goal"
    one, many, goals = data["weights_to_actors"]["1"], data["weights_to_actors"]["16"], data["bars"]
    yield "one actor: fetch 13 MB of weights, ms", number(one["fetch_ms"]), None, number(goals["one_actor_ms"])
    yield "one actor: publication to arrival, ms", number(one["published_ms"]), number(one["worst_ms"]), None
    yield ("16 actors: publication to last arrival, ms", number(many["published_ms"]), number(many["worst_ms"]),
           number(goals["sixteen_actors_ms"]))
    worst = max(game["bytes_per_step"] for game in data["games"]) / 1000
    yield ("traffic per Atari step, KB", number(data["kb_per_step"], 2), number(worst, 2),
           number(goals["kb_per_step"], 2))
    yield ("CPU time to send and store / to emulate", percent(data["share_of_emulators"]),
           percent(data["worst_share"]), percent(goals["share_of_emulators"]))


@table("observed.json", "soak")
def soak(data: Data) -> Iterator[Row]:
    yield "test", "result"
    found = data["soak"]
    yield f"learner killed {found['cell_kills']} times", "resumes from a valid checkpoint every time"
    yield (f"{found['kills']} kills in five minutes, of any process but the driver",
           f"{found['solved']} CartPole runs solved")
    yield (f"network between two hosts cut for {found['cable_s']} s",
           f"actors continue after {found['again_s']:.0f} s, nothing lost or stored twice")


# -- Cost ----------------------------------------------------------------------------------------------------------

@table("cost.json", "cpu")
def cpu_costs(data: Data) -> Iterator[Row]:
    """Rates per CPU second of the base of each recipe, and at both ends of each axis."""
    yield "setting", *(f"{name}: {rate}" for name in ("CartPole", "Pong") for rate in ("steps/s", "updates/s"))
    for label, wishes in [("base", [{"recipe": recipe} | base for recipe, base in cost.BASE.items()])] + [
            (f"{axis}: {value:,}", [cost.point(recipe, axis, value) for recipe in cost.AXES])
            for axis in AXES for value in ends(value for axes in cost.AXES.values() for value in axes[axis])]:
        cells: list[Cell] = []
        for wish in wishes:
            one = next((one for one in data["results"] if wish.items() <= one.items()), None)
            cells += ["–", "–"] if one is None else [number(one["steps_per_cpu_s"]),
                                                     number(one["updates_per_cpu_s"], 1)]
        yield label, *cells


@table("cost_gpu.json", "gpu")
def gpu_costs(data: Data) -> Iterator[Row]:
    yield "setting", "steps/s", "updates/s", "GPU memory, GB"
    for label, wish in [("base", cost.GPU_BASE)] + [
            (f"{axis}: {value:,}", cost.GPU_BASE | {axis: value}) for axis in AXES
            for value in ends(cost.GPU_AXES[axis])]:
        one = next(one for one in data["results"] if wish.items() <= one.items())
        yield label, number(one.get("steps_per_s")), number(one["updates_per_s"]), number(one["gpu_mb"] / 1e3, 1)


AXES = ("lanes", "batch", "replay")


def ends(values: Iterable[int]) -> tuple[int, int]:
    found = sorted(values)
    return found[0], found[-1]
