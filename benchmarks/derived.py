"""What is computed of the committed results before it is written into a page: medians, counts, ratios.

`document("learn.json")` is what a mark <!--=learn.json; ...--> looks into: the file itself, or what is made of it here.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cost
from learn import HEADS, MATRIX, TORSOS

RESULTS = Path(__file__).parent / "results"
IN_TIME_S = 120
"""Of the start of the process: the time in which Pong is to be learnt."""
NO_OPS = 8
"""Decisions by which games may differ that begin with up to 30 frames of doing nothing, and are the same otherwise."""
ONSET = -18.5
"""A return of Pong in training, of -21 to 21, that shows that learning has begun."""


@functools.cache
def document(file: str) -> Any:
    """A result file by its name, with what is derived of it; or a folder of results of bench.py."""
    if (RESULTS / file).is_dir():
        return sides({path.parent.name: json.loads(path.read_text()) for path in (RESULTS / file).glob("*/bench.json")})
    text = (RESULTS / file).read_text()
    data = [json.loads(line) for line in text.splitlines()] if file.endswith(".jsonl") else json.loads(text)
    stem = file.partition(".")[0]
    make = learning if stem.startswith("learn") else DERIVED.get(stem)
    return make(data) if make else data


def learning(data: dict[str, Any]) -> dict[str, Any]:
    """Every row of a learning matrix: how many seeds solved it, and in how many steps."""
    found: dict[str, Any] = {}
    for name, runs in data["rows"].items():
        if name not in MATRIX:
            continue
        goal = MATRIX[name][1]
        steps = [run["steps"] for run in runs if run["mean_reward"] >= goal]
        scores = [run["mean_reward"] for run in runs]
        digits = 1 if max(abs(score) for score in scores) < 100 else 0
        found[name] = {
            "solved": f"{len(steps)} of {len(runs)}", "goal": goal, "scores": listed(scores, digits),
            "missed": " and ".join(number(score, digits) for score in scores if score < goal)}
        if steps:
            found[name] |= {"steps": round(statistics.median(steps)), "least": min(steps), "most": max(steps)}
            pairs = [(number(run["mean_reward"], digits), run["steps"]) for run in runs]
            found[name]["scores at"] = ", ".join(f"{score} ({at:,})" for score, at in pairs)
        if marks := [run["found_at"] for run in runs if "found_at" in run]:  # the first evaluation that was good enough
            found[name] |= {"first": round(min(marks), -4), "last": round(max(marks), -4)}
    for name, row in found.items():
        alone = found.get(name.partition(" ")[0], {})
        if "steps" in row and "steps" in alone:
            row["of alone"] = row["steps"] / alone["steps"]
    names = [f"catch {torso} {head}" for torso in TORSOS for head in HEADS]
    small = [run["mean_reward"] >= MATRIX[name][1] for name in names for run in data["rows"].get(name, ())]
    return found | {"small catch": {"solved": f"{sum(small)} of {len(small)}"}}


def gpu(records: list[dict[str, Any]]) -> dict[str, Any]:
    """fast_speed.jsonl: the last record of every kind and setting, or of another recipe; `before` is the first."""
    found: dict[str, Any] = {"before": {}}
    for one in records:
        words = [re.sub(r"^\w+\.", "", word) for word in one.get("set", ())]  # without their section
        algo = [word.removeprefix("algo=") for word in words if word.startswith("algo=")]
        marks = [str(one[name]) for name in ("batch", "seed") if name in one]
        words += [f"{name}={one[name]:g}" for name, usual in (("aim", 18), ("seconds", 20))
                  if one.get(name, usual) != usual]
        recipe = one.get("recipe", "pong-fast")
        key = " ".join([one["kind"], *marks, *((algo or words) if recipe == "pong-fast" else [recipe])])
        found[key] = one | (KINDS[one["kind"]](one) if one["kind"] in KINDS else {})
        found["before"].setdefault(key, found[key])
    for rows, words in ((found, ""), (found["before"], ""), (found, " norm=layer"),
                        (found, " lanes=32 from_return=-8")):
        rows[f"pong{words}"] = paces([rows[f"pong {seed}{words}"] for seed in (1, 2, 3)])
    found["eight times"] = eight_times(records)
    found["pong-fast"] = solved_pong(records)
    for batch in (32, 512):
        plain = f"updates {batch} alpha=0.6 norm=none"
        found[f"compiled {batch}"] = found[f"{plain} compile=true"]["updates_per_s"] / found[plain]["updates_per_s"]
    for precision in ("fp32", "bf16"):
        for name, key in (("gap", "distance"), ("early gap", "distance_early")):
            gaps = {(one["algo"], one["alpha"]): one[key] for one in records
                    if key in one and "distance_of_two_in_pieces" in one and one["precision"] == precision}.values()
            found[f"{name} {precision}"] = {"least": min(gaps), "most": max(gaps)}
    for one in (one for one in records if one["kind"] == "parity"):
        found[f"parity {one['capture']}"] = {
            "solved_at": ", ".join("not" if steps is None else number(steps, 0) for steps in one["solved_at"])}
    return found


def solved_pong(records: list[dict[str, Any]]) -> dict[str, Any]:
    """All runs of `pong-fast` as it is, which are those whose policies played on then; and those `before` it looked
    five steps ahead, of which no commit was written down."""
    runs = [one | pong(one) for one in records if one["kind"] == "pong" and not one["set"] and "games" in one]
    now, before = ([run for run in runs if ("commit" in run) == new] for new in (True, False))
    return timed_runs(now) | {"before": timed_runs(before)}


def in_time(runs: list[dict[str, Any]]) -> list[float]:
    """The seconds of those that solved Pong soon enough, from the first to the last."""
    return sorted(run["solved_s"] for run in runs if run["solved_s"] and run["solved_s"] <= IN_TIME_S)


def paces(runs: list[dict[str, Any]]) -> dict[str, Any]:
    rates, starts = [run["steps_per_s"] for run in runs], [run["start_s"] for run in runs if run["start_s"]]
    return {"solved": f"{len(in_time(runs))} of {len(runs)}", "slowest": min(rates), "fastest": max(rates),
            "starts": [min(starts, default=None), max(starts, default=None)]}


def timed_runs(runs: list[dict[str, Any]]) -> dict[str, Any]:
    lines = ["| date | seed | aim | seconds | evaluations: step, score | 30 more games |", "|---|---|---|---|---|---|"]
    for run in runs:
        spent = f"**{run['solved_s']:.0f}**" if run["solved_s"] else "not in 150"
        lines.append(f"| {run['date']} | {run['seed']} | {run.get('aim', 18):g} | {spent} | {run['evaluations']} | "
                     f"{run['fresh']} |")
    fresh = [run["games"]["mean_reward"] for run in runs if isinstance(run["games"], dict)]
    spent = in_time(runs)
    return paces(runs) | {"table": block(lines), "soonest": spent[0], "latest": spent[-1], "least fresh": min(fresh),
                          "most fresh": max(fresh)}


def eight_times(records: list[dict[str, Any]]) -> dict[str, Any]:
    """All runs that learnt from every step eight times, but for the first: steps were not stored beside emulation. In
    those of `now` actors take weights that are complete."""
    words = {"replay.samples_per_insert=8", "learner.batch_size=512", "replay.alpha=0.6", "agent.norm=none",
             "run.log_period_steps=20000"}
    may = {"eval.beside=false", "eval.process=false", "agent.n_step=3", "replay.chunk_steps=128"}
    runs = [one | acting(one) for one in records if one["kind"] == "acting" and set(one["set"]) - may == words][1:]
    lines = ["| date | stream of actors | steps/s | bare emulators | share | ms: waits for games, chooses, stores | "
             "200M frames, min |", "|---|---|---|---|---|---|---|"]
    for run in runs:
        parts = ", ".join(f"{run['ms'][f'actor/{name}_ms']:.1f}" for name in ("env", "act", "store"))
        stream = "their own" if "state" in run else "the learner's"
        if "commit" in run:
            long = "replay.chunk_steps=128" in run["set"]
            stream = "their own, complete weights" + (", chunks of 128 steps" if long else "")
        lines.append(f"| {run['date']} | {stream} | {run['steps_per_s']:,} | {run['random_steps_per_s']:,} | "
                     f"{run['share']:.0%} | {parts} | {run['frames_200m_min']:.0f} |".replace("%", " %"))
    return {"table": block(lines), **among(runs), "now": among([run for run in runs if "commit" in run]),
            "newest": runs[-1]}


def among(runs: list[dict[str, Any]]) -> dict[str, Any]:
    found = {}
    for name, key in (("share", "share"), ("rate", "steps_per_s"), ("minutes", "frames_200m_min")):
        values = [run[key] for run in runs]
        found |= {f"least {name}": min(values), f"most {name}": max(values),
                  f"median {name}": statistics.median(values)}
    return found | {"runs": len(runs)}


def acting(run: dict[str, Any]) -> dict[str, Any]:
    """Minutes for 200 million frames, 4 per step; in one process, the ms that each of two groups has of a round."""
    apart = any(re.match(r"placement=processes|actors=[1-9]", word) for word in run["set"])  # of 0.1, and now
    together = "lanes" in run and not apart
    group = {"group_ms": 500 * run["lanes"] / run["steps_per_s"]} if together else {}
    return {"frames_200m_min": 200e6 / 4 / run["steps_per_s"] / 60} | group


def pong(run: dict[str, Any]) -> dict[str, Any]:
    """A run to solve Pong: its evaluations, its end, and its pace, the median between two records."""
    paces = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.pairwise(run["curve"]) if b[1] > a[1]]
    judged = "; ".join(f"{step:,}: {score:.1f}" for _, step, score, *_ in run["judged"])
    reached = " and ".join(f"{score:.1f} at {step:,}" for _, step, score, *_ in run["judged"])
    _, step, last = run["curve"][-1]
    games = run.get("games")
    return {"evaluations": judged or "none", "reached": reached, "end": f"{number(last, 1)} at {round(step, -4):,}",
            "steps_per_s": statistics.median(paces),
            "start_s": run["solved_s"] and run["solved_s"] + run["judged"][-1][3] - run["judged"][-1][0],
            "fresh": f"{games['mean_reward']:.1f}" if isinstance(games, dict) else "not played"}


def family(data: dict[str, Any]) -> dict[str, Any]:
    """pong_family.json: its runs, when they had begun to score, and a table of them."""
    lines = ["| agent | steps | updates | minutes | last evaluation | games afterwards | differ, at least |",
             "|---|---|---|---|---|---|---|"]
    for name, row in data["rows"].items():
        games = row.get("games")
        judged = f"{number(row['curve'][-1][1], 1)} ± {row['curve'][-1][2]:.1f}" if row["curve"] else "none"
        after = f"**{number(games['mean_reward'], 1)}** of {games['episodes']}" if games else "not played"
        lines.append(f"| `{name}` | {row['steps']:,} | {row['updates']:,} | {row['seconds'] / 60:.1f} | {judged} | "
                     f"{after} | {differing(games) if games else '-'} |")
    found = {name: row | onset(row) for name, row in data["rows"].items()}
    recurrent = [row["onset updates"] for row in found.values()
                 if row["settings"][0] in ("r2d2", "ngu", "agent57") and "onset updates" in row]
    return found | {"table": block(lines), "recurrent": {"least": min(recurrent), "most": max(recurrent)}}


def differing(games: dict[str, Any]) -> int:
    """How many games there are at least: those of one return whose lengths lie within the no-ops of others are one."""
    found, last = 0, None
    for game in sorted(zip(games["returns"], games["lengths"], strict=True)):
        found += last is None or game[0] != last[0] or game[1] - last[1] > NO_OPS
        last = game
    return found


def onset(row: dict[str, Any]) -> dict[str, Any]:
    """When a run of Pong had begun to score, if it did: its steps as text, and its updates."""
    for (step, score), (updates, _) in zip(row["training"], row["training_clocks"], strict=True):
        if score >= ONSET:
            return {"onset": f"{step:,}", "onset updates": updates}
    return {}


def returns(data: dict[str, Any]) -> dict[str, Any]:
    """continuous_returns.json and its like: what each contender's seeds returned."""
    return {name: {"returns": listed([run["mean_reward"] for run in runs], 0), "seeds": len(runs),
                   "median": statistics.median(run["mean_reward"] for run in runs),
                   "best": max(score for run in runs for _, score in run["curve"]),
                   "at": {str(step): listed([dict(map(tuple, run["curve"]))[step] for run in runs], 0)
                          for step, _ in runs[0]["curve"]},
                   "cpu_min": statistics.median(run["cpu_seconds"] for run in runs) / 60}
            for name, runs in data["rows"].items()}


def memory(data: dict[str, Any]) -> dict[str, Any]:
    """replay_memory.json: games by name, and the least and the most of all."""
    games = {game["game"]: game for game in data["games"]}
    times = [game["sample_ms"] for game in games.values()]
    over = sum(time > data["bars"]["sample_ms"] for time in times)
    return data | {"games": games, "least_ms": min(times), "most_ms": max(times), "over": f"{over} of {len(times)}"}


def agents(data: dict[str, Any]) -> dict[str, Any]:
    """memory_speed.json: what curiosity adds to the time of a step."""
    rates = data["medians"]
    plain, few, many = (rates[name] for name in ("R2D2 acting, steps/s", "NGU acting, steps/s",
                                                 "NGU acting, 5,000 memories, steps/s"))
    nearest = plain / rates["nearest of 5,000 memories, lanes/s"]
    return data | {"on top": {"500": plain / few - 1, "5,000": plain / many - 1, "nearest": nearest}}


def wire(data: dict[str, Any]) -> dict[str, Any]:
    return data | {"worst_kb": max(game["bytes_per_step"] for game in data["games"]) / 1000}


def precision(data: dict[str, Any]) -> dict[str, Any]:
    passed = {name: [run["first_step_at"]["18"] is not None for run in runs] for name, runs in data["rows"].items()}
    shared = data["summary"]["evaluations_shared"]
    last = {name: [run["evaluations"][shared - 1][1] for run in runs] for name, runs in data["rows"].items()}
    return data | {"passed 18": {name: f"{sum(each)} of {len(each)}" for name, each in passed.items()},
                   "apart": {name: max(scores) - min(scores) for name, scores in last.items()}}


def deep_sea(data: dict[str, Any]) -> dict[str, Any]:
    """What curiosity_plots.py saw: how many episodes followed the less curious half of the arms."""
    half = data["arms"] // 2
    for part in data["fifths"].values():
        part["calm"] = sum(part["share_of_arms"][:half])
    return data | {"calmest": max(sum(shares[:half]) for shares in data["shares"])}


def sides(works: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Results of bench.py by workload: qfleet, every peer, and the ratios per second of CPU and by the clock."""
    lines = ["| `bench.py` | ours | SB3 | ratio | Tianshou | ratio |", "|---|---|---|---|---|---|"]
    largest = 0.0
    for work, found in sorted(works.items()):
        medians = {one["name"]: one["median"]["per_cpu_s"] for one in found["results"]}
        for one in found["results"]:
            rates = [each["per_cpu_s"] for each in one["rounds"]]
            largest = max(largest, max(rates) / min(rates) - 1)
            if one["who"] != "qfleet":
                continue
            cells = [f"`{work}`{one['name'].removeprefix('qfleet')}", number(one["median"]["per_cpu_s"], 0)]
            for pair, ratio in found["ratio"][work].items():
                ours, _, peer = pair.partition(" / ")
                if ours == one["name"]:
                    cells += [number(medians[peer], 0), f"**{ratio['per_cpu_s']:.2f}** ({ratio['per_s']:.2f})"]
            lines.append("| " + " | ".join(cells) + " |")
    return {"table": block(lines), "spread": largest}


def profiles(data: dict[str, Any]) -> dict[str, Any]:
    """bench/profile.json: the parts of an update, work by work, and how much of it multiplies matrices."""
    works = data["profile"]
    parts = {work: {part["name"].partition(" (")[0]: part for part in found["parts"]} for work, found in works.items()}
    lines = ["| part | " + " | ".join(works) + " |", "|" + "---|" * (len(works) + 1)]
    for name in dict.fromkeys(name for each in parts.values() for name in each):
        lines.append(f"| {name} | " + " | ".join(_cost(each.get(name)) for each in parts.values()) + " |")
    lines.append("| updates per CPU second | " + " | ".join(f"{found['updates_per_cpu_s']:.0f}" for found in
                                                             works.values()) + " |")
    shares, distances = [], []
    for each in parts.values():
        products = [part for name, part in each.items() if "forward" in name or "backward" in name]
        shares.append(sum(part["cpu_ms"] for part in products) / sum(part["cpu_ms"] for part in each.values()))
        distances += [part["distance"] for part in products]
    copies = [found["rates"]["bytes_per_s"] / 1e9 for found in works.values()]
    return data | {"table": block(lines), "least": min(shares), "most": max(shares), "nearest": min(distances),
                   "farthest": max(distances), "least copied": min(copies), "most copied": max(copies),
                   "gflops": {work: found["rates"]["flops"] / 1e9 for work, found in works.items()}}


def _cost(part: dict[str, Any] | None) -> str:
    if part is None:
        return ""
    return f"{part['cpu_ms']:.2f}" + (f" ({part['distance']:.2g})" if part["distance"] else "")


def costs(data: dict[str, Any]) -> dict[str, Any]:
    """cost.json: a table for every axis, and by recipe what the largest batch costs and a stored step takes."""
    found: dict[str, Any] = {axis: block([cost.table(data["results"], axis)]) for axis in ("lanes", "batch", "replay")}
    for recipe in cost.AXES:
        rows = [one for one in data["results"] if one["recipe"] == recipe]
        small, *_, large = sorted((one for one in rows if one["lanes"] == 8), key=lambda one: one["batch"])
        full, wide = max(rows, key=lambda one: one["replay"]), max(rows, key=lambda one: one["lanes"])
        dearer = small["updates_per_cpu_s"] / large["updates_per_cpu_s"]
        found[recipe] = {"samples": large["batch"] / small["batch"], "dearer": dearer,
                         "more": large["batch"] / small["batch"] / dearer, "stored": wide["stored"],
                         "bytes": 1e6 * full["replay_mb"] / full["replay"]}
    return found


def gpu_costs(data: dict[str, Any]) -> dict[str, Any]:
    """cost_gpu.json: a table for every axis, and what the largest batch, replay and number of lanes cost."""
    found: dict[str, Any] = {axis: block([cost.gpu_table(data["results"], axis)]) for axis in cost.GPU_AXES}
    ends = {axis: [next(one for one in data["results"] if (cost.GPU_BASE | {axis: value}).items() <= one.items())
                   for value in (values[0], values[-1])] for axis, values in cost.GPU_AXES.items()}
    (few, many), (small, large), (short, long) = (ends[axis] for axis in ("lanes", "batch", "replay"))
    dearer = small["updates_per_s"] / large["updates_per_s"]
    return found | {"samples": large["batch"] / small["batch"], "dearer": dearer,
                    "more": large["batch"] / small["batch"] / dearer,
                    "faster": many["steps_per_s"] / few["steps_per_s"],
                    "slower": short["updates_per_s"] / long["updates_per_s"],
                    "bytes": 1e6 * long["replay_mb"] / long["replay"], "date": data["machine"]["date"],
                    "most GB": max(one["gpu_mb"] for one in data["results"]) / 1e3}


WHOLE = "learner.parts=1"
"""What 0.1 called a run whose batches were learnt whole, as all are now."""


def strangers(data: dict[str, Any]) -> dict[str, Any]:
    """foreign_load.json: what a process that keeps a core busy costs each run."""
    lines = ["| run | threads | steps/s | beside a busy core | slower by a factor of |", "|---|---|---|---|---|"]
    runs = {run["run"]: run for run in data["runs"]}
    for name, run in runs.items():
        if f"{name}, {WHOLE}" in runs or "run.share_cores" in name:  # ways of 0.1 that are no more
            continue
        rates = [number(run[rate], 0) for rate in ("threads", "quiet", "busy")]
        lines.append(f"| {name.removesuffix(f', {WHOLE}')} | {' | '.join(rates)} | {run['slowdown']:.1f} |")
    return data | {"table": block(lines)}


def block(lines: list[str]) -> str:
    """Lines of a table between marks that stand alone in their lines."""
    return "\n\n" + "\n".join(lines) + "\n\n"


def number(value: float, digits: int) -> str:
    return f"{value:,.{digits}f}".replace("-", "−")


def listed(values: list[float], digits: int) -> str:
    return ", ".join(number(value, digits) for value in values)


KINDS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {"pong": pong, "acting": acting}
DERIVED: dict[str, Callable[[Any], Any]] = {
    "fast_speed": gpu, "replay_memory": memory, "memory_speed": agents, "wire": wire,
    "precision": precision, "deep_sea": deep_sea, "agent57_deep_sea": deep_sea,
    "cost": costs, "cost_gpu": gpu_costs,
    "pong_family": family,
    "continuous_returns": returns, "continuous_lanes": returns, "continuous_bf16": returns,
    "continuous_fresh": returns, "continuous_once": returns, "continuous_plain": returns, "hopper": returns,
    "foreign_load": strangers, "hopper_tried": returns, "walker2d": returns, "bench/profile": profiles}
