"""Tables of docs/benchmarks.md: speed and other libraries, memory, the network, faults, and how cost grows."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import cost
import spread
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
    yield "part", "qfleet", "peer", "ratio"
    yield ("prioritised sample and update, 512 of a million, µs", number(data["qfleet"]["both_us"]),
           f"cpprb {number(data['cpprb']['both_us'])}", number(data["ratio"], 1))
    acting = read("acting_speed.json")
    rates = {name: found["per_s"] for name, found in acting["median"].items()}
    yield ("acting on Pong and storing, steps/s", number(rates["qfleet"]),
           f"emulators alone {number(rates['ale_random_actions'])}",
           number(acting["ratio"]["qfleet / ale_random_actions"]["per_s"], 2))


@table("foreign_load.json", "runs")
def busy_core(data: Data) -> Iterator[Row]:
    """What another process that keeps one core busy costs a run."""
    yield "recipe", "threads", "steps/s", "beside a busy core", "slowdown"
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
    return f"{number(spent, 2)} ({number(spent / sum(part['cpu_ms'] / part['distance'] for part in parts), 1)} ×)"


# -- Memory, network, faults -------------------------------------------------------------------------------------------

@table("replay_memory.json", "games")
def replay_memory(data: Data) -> Iterator[Row]:
    """The mean of all games, and those with the smallest and the largest replay."""
    games = sorted(data["games"], key=lambda game: game["gb_per_million"])
    times = [game["sample_ms"] for game in games]
    yield "game", "GB per million steps", "batch of 32, ms"
    for label, game in (("smallest", games[0]), ("largest", games[-1])):
        yield (f"{label}: {game['game'].replace('_', ' ').title()}", number(game["gb_per_million"], 2),
               number(game["sample_ms"], 1))
    yield f"mean of {len(games)} games", number(data["mean_gb_per_million"], 2), number(statistics.fmean(times), 1)


@table("steady_memory.json", "process")
def steady_memory(data: Data) -> Iterator[Row]:
    yield "recipe", "replay full, MB", "at the end, MB"
    for name, row in data["rows"].items():
        yield f"`{name}`", *(number(row[key]) for key in ("first_mb", "last_mb"))


@table("wire.json", "quantities")
def wire(data: Data) -> Iterator[Row]:
    yield "quantity", "measured", "goal"
    one, many, goals = data["weights_to_actors"]["1"], data["weights_to_actors"]["16"], data["bars"]
    yield "one actor fetches 13 MB of weights, ms", number(one["fetch_ms"]), number(goals["one_actor_ms"])
    yield "the same, from publication to arrival, ms", number(one["published_ms"]), None
    yield ("sixteen actors at once, until the last has them, ms", number(many["published_ms"]),
           number(goals["sixteen_actors_ms"]))
    yield "the same, worst of 20, ms", number(many["worst_ms"]), None
    worst = max(game["bytes_per_step"] for game in data["games"]) / 1000
    yield "KB per Atari step, mean of eight games", number(data["kb_per_step"], 2), number(goals["kb_per_step"], 2)
    yield "the same, worst game", number(worst, 2), None
    yield ("CPU time of sending and storing, share of the emulators'", percent(data["share_of_emulators"]),
           percent(goals["share_of_emulators"]))
    yield "the same, worst game", percent(data["worst_share"]), None


@table("observed.json", "soak")
def soak(data: Data) -> Iterator[Row]:
    yield "test", "result"
    found = data["soak"]
    yield f"the learner is killed {found['cell_kills']} times", "resumes from a valid checkpoint each time"
    yield (f"{found['kills']} kills of any process but the driver in five minutes",
           f"{found['solved']} CartPole runs are solved")
    yield (f"the network between two hosts is cut for {found['cable_s']} s",
           f"steps rise again after {found['again_s']:.0f} s, nothing is lost or stored twice")


# -- Scaling and cost --------------------------------------------------------------------------------------------------

@table("spread.json", "speed-up")
def speed_up(data: Data) -> Iterator[Row]:
    """Environment steps per second, as a multiple of those of one."""
    found = {"actor processes": spread.medians(data["rows"])["actors"],
             "learners of a parameter server": spread.medians(read("spread_cells.json")["rows"])["cells"]}
    counts = list(dict.fromkeys(count for rows in found.values() for count in rows))
    yield "", *map(str, counts)
    for name, rows in found.items():
        yield name, *(number(rows[count]["gain"], 1) if count in rows else "–" for count in counts)


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
