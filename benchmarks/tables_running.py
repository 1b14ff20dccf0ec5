"""Tables of the pages about running: one GPU, several learners and actors, Ray.

Each function takes a file of benchmarks/results; `tables.py` says how they are found.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import learn
import spread
import sweep
from tables import Cell, number, percent, read, table

Row = tuple[Cell, ...]
Records = list[dict[str, Any]]
PLAIN = ("agent.norm=none", "replay.alpha=0.6")
"""Settings of the prioritised agent without LayerNorm."""
FRAMES_PER_STEP = 4


def newest(records: Records, **wanted: Any) -> dict[str, Any]:
    """The last record that has these values; `set` is compared without regard to order."""
    wanted["set"] = sorted(wanted.get("set", ()))
    return [one for one in records
            if {key: sorted(one.get(key, ())) if key == "set" else one.get(key) for key in wanted} == wanted][-1]


# ---- One GPU ----

AGENTS = (
    ("`dqn`, double, dueling, prioritised", "pong-fast", 32, PLAIN),
    ("`dqn`, double, dueling, prioritised", "pong-fast", 512, PLAIN),
    ("recipe `pong-fast`", "pong-fast", 256, ()),
    ("recipe `r2d2`, sequences of 120 steps", "r2d2", 64, ()),
)


@table("fast_speed.jsonl", "updates")
def updates(data: Records) -> Iterator[Row]:
    yield "agent", "batch", "updates/s"
    for name, recipe, batch, words in AGENTS:
        found = newest(data, kind="updates", recipe=recipe, batch=batch, set=words)
        yield name, batch, number(found["updates_per_s"])


@table("taped.jsonl", "capture")
def capture(data: Records) -> Iterator[Row]:
    """What of an update is one CUDA graph, and what it is worth."""
    yield "replay", "CUDA graph", "updates/s, batch 32", "updates/s, batch 512"
    whole = read("fast_speed.jsonl")
    rates = [newest(whole, kind="updates", recipe="pong-fast", batch=batch, set=PLAIN)["updates_per_s"]
             for batch in (32, 512)]
    yield "GPU", "whole update", *map(number, rates)
    for store, captured in (("device", True), ("device", False), ("host", True), ("host", False)):
        found = {one["batch"]: one["updates_per_s"] for one in data if one["kind"] == "updates"
                 and (one["store"], one["capture"]) == (store, captured)}
        yield ("GPU" if store == "device" else "main memory", "loss and gradient" if captured else "none",
               number(found.get(32)), number(found.get(512)))


@table("bench_gpu.json", "peers")
def gpu_peers(data: dict[str, Any]) -> Iterator[Row]:
    yield "batch", "qfleet, bf16", "qfleet, fp32", "SB3, fp32", "ratio, bf16", "ratio, fp32"
    for batch, found in ((32, data), (512, read("bench_gpu_512.json"))):
        rates = {one["name"]: one["median"]["per_s"] for one in found["results"]}
        bf16, fp32, sb3 = (rates[name] for name in ("qfleet, bf16", "qfleet, fp32", "sb3"))
        yield batch, number(bf16), number(fp32), number(sb3), number(bf16 / sb3, 1), number(fp32 / sb3, 1)


@table("fast_speed.jsonl", "pong")
def pong(data: Records) -> Iterator[Row]:
    """Time, steps and score of the runs that reached the score."""
    runs = solved_pong(data)
    yield f"{len(runs)} runs", "least", "median", "most"
    yield "seconds", *map(number, ends([one["solved_s"] for one in runs]))
    yield "environment steps", *map(number, ends([one["judged"][-1][1] for one in runs]))
    yield ("mean score of 30 further games",
           *(number(score, 1) for score in ends([one["games"]["mean_reward"] for one in runs])))


def solved_pong(records: Records) -> Records:
    """Runs of the recipe `pong-fast` as it is now that reached the score, and then played further games."""
    return [one for one in records if one["kind"] == "pong" and not one["set"] and "commit" in one
            and isinstance(one.get("games"), dict)]


@table("fast_speed.jsonl", "eight samples per step")
def eight_times(data: Records) -> Iterator[Row]:
    """Runs that draw every step eight times, with the acting that there is now."""
    runs = [one for one in data if one["kind"] == "acting" and "commit" in one
            and {"replay.samples_per_insert=8", "learner.batch_size=512"} <= set(one["set"])]
    rates = [one["steps_per_s"] for one in runs]
    yield f"{len(runs)} runs", "least", "median", "most"
    yield "environment steps per second", *map(number, ends(rates))
    yield "share of the bare emulators' speed", *map(percent, ends([one["share"] for one in runs]))
    yield "minutes for 200 million frames", *map(number, ends([200e6 / FRAMES_PER_STEP / rate / 60 for rate in rates]))


def ends(values: list[float]) -> tuple[float, float, float]:
    """Minimum, median and maximum."""
    return min(values), statistics.median(values), max(values)


# ---- Several learners ----

WAYS = (("one process", "cartpole", "alone"), ("`sync=allreduce`, 2 learners", "cartpole 2 ranks", "ranks"),
        ("`sync=server`, 3 learners, 2 shards", "cartpole server", "server"))
"""A name, its row of learn.json, and its row of scaling.json."""


@table("learn.json", "several learners")
def several_learners(data: dict[str, Any]) -> Iterator[Row]:
    yield "", "solved", "median steps", "seconds for 20,000 steps"
    timed = read("scaling.json")["ways"]
    for label, name, way in WAYS:
        goal = learn.MATRIX[name][1]
        steps = [run["steps"] for run in data["rows"][name] if run["mean_reward"] >= goal]
        yield (label, f"{len(steps)} of {len(data['rows'][name])}", round(statistics.median(steps)),
               number(statistics.median(run["seconds"] for run in timed[way])))


@table("ranks_speed.json", "efficiency")
def efficiency(data: dict[str, Any]) -> Iterator[Row]:
    yield "network", "updates/s alone", "updates/s as ranks", "efficiency"
    for label, name in (("CartPole, 2 layers of 256 units", "cartpole"), ("Pong, Nature CNN", "pong"),
                        ("Pong, `allreduce.overlap=true`", "pong, overlapped")):
        found = data["median"][name]
        yield label, number(found["alone"]), number(found["ranks"]), number(found["efficiency"], 2)


@table("spread.json", "actors")
def actors(data: dict[str, Any]) -> Iterator[Row]:
    yield from spreads(data, "actors")


@table("spread_cells.json", "learners")
def learners(data: dict[str, Any]) -> Iterator[Row]:
    yield from spreads(data, "cells")


def spreads(data: dict[str, Any], way: str) -> Iterator[Row]:
    yield spread.LABELS[way], "steps/s", "updates/s", "speed-up"
    for value, row in spread.medians(data["rows"])[way].items():
        yield str(value), number(row["steps_per_s"]), number(row["updates_per_s"]), number(row["gain"], 1)


@table("sweep_lanes.json", "lanes")
def lanes(data: dict[str, Any]) -> Iterator[Row]:
    yield from swept(data, "`env.lanes`", "steps_per_cpu_s", "steps per CPU s")


@table("sweep_batch.json", "batch")
def batches(data: dict[str, Any]) -> Iterator[Row]:
    yield from swept(data, "`learner.batch_size`", "updates_per_cpu_s", "updates per CPU s")


def swept(data: dict[str, Any], label: str, rate: str, rate_label: str) -> Iterator[Row]:
    """Every second value; the pictures show all."""
    yield label, "solved", "steps to solve", "CPU s to solve", rate_label
    for value, runs in list(data["rows"].items())[::2]:
        found = sweep.summary(runs)
        yield value, found["solved"], number(found["steps_to"]), number(found["cpu_s_to"], 1), number(found[rate])


# ---- Ray ----

@table("ray_speed.json", "launchers")
def ray(data: dict[str, Any]) -> Iterator[Row]:
    yield "CartPole, 2 actors", "steps/s"
    for label, name in (("`launcher=local`", "processes"), ("`launcher=ray`", "ray")):
        yield label, number(data["median"]["cartpole"][name])
