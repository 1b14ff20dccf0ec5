"""The table of README.md: qfleet compared with Stable-Baselines3."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from suite_tables import Group, groups, short
from tables import number, read, table
from tables_running import solved_pong

from qfleet.core.errors import UserError

COMPARED = ("default", "sb3")
ATARI_OBSERVATION_BYTES = 4 * 84 * 84
NOT_MEASURED = "not measured"


@table("suite.jsonl", "readme")
def readme(records: list[dict[str, Any]]) -> Iterator[Sequence[str]]:
    found = groups(records)
    yield "", "qfleet", "Stable-Baselines3"
    lander = [found.get(("LunarLander-v3", each)) for each in COMPARED]
    yield ("LunarLander-v3, default settings, 300,000 steps: mean score", *map(score, lander))
    both = [name for name, contender in found if contender == COMPARED[1] and (name, COMPARED[0]) in found
            and found[name, contender].judged]
    yield (f"[{len(both)} tasks](docs/results.md#the-defaults-on-common-tasks) trained with both libraries, "
           "default settings: solved runs",
           *(solved([found[name, each] for name in both]) for each in COMPARED))
    yield ("Pong, 8 environments, one thread: steps per CPU second",
           f"{rate('pong', 'qfleet, bf16, 8 lanes')} in bfloat16, {rate('pong', 'qfleet, fp32, 8 lanes')} in float32",
           f"{rate('pong', 'sb3, 8 lanes')} in float32")
    yield "Pong on one H200: seconds from process start to a score of 18.5", seconds_to_pong(), NOT_MEASURED
    memory = read("replay_memory.json")
    yield (f"Replay memory for a million Atari observations, mean of {len(memory['games'])} games",
           f"{memory['mean_gb_per_million']:.2f} GB",
           f"{ATARI_OBSERVATION_BYTES * 1e6 / 1e9:.0f} GB, computed")
    yield "Bitwise identical results after a kill and a resume", "on request, in one process on a CPU", "no"


def score(group: Group | None) -> str:
    """Mean over the seeds, and how many solved the task."""
    if group is None or not group.done:
        return NOT_MEASURED
    mean = sum(run["score"] for run in group.done) / len(group.done)
    return f"{short(mean)} ({group.solved} of {len(group.runs)} seeds solve it)"


def solved(found: Sequence[Group]) -> str:
    if not found:
        return NOT_MEASURED
    return f"{sum(group.solved for group in found)} of {sum(len(group.runs) for group in found)}"


def rate(workload: str, contender: str) -> str:
    """Steps per CPU second of a contender of bench.py, as docs/benchmarks.md lists them."""
    found = next(one for one in read("bench")[workload]["results"] if one["name"] == contender)
    return number(found["median"]["per_cpu_s"])


def seconds_to_pong() -> str:
    """Least and greatest time of the runs of the recipe `pong-fast` that solved Pong."""
    times = [run["solved_s"] for run in solved_pong(read("fast_speed.jsonl"))]
    if not times:
        raise UserError("fast_speed.jsonl has no solved run of pong-fast")
    return f"{min(times):.0f} to {max(times):.0f}"
