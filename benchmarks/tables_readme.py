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
    yield ("LunarLander-v3, 300,000 steps, default settings: mean score", *map(score, lander))
    both = [name for name, contender in found if contender == COMPARED[1] and (name, COMPARED[0]) in found
            and found[name, contender].judged]
    yield (f"{len(both)} tasks of the development suite, default settings: runs that solve their task",
           *(solved([found[name, each] for name in both]) for each in COMPARED))
    cartpole, pong = read("cartpole_speed.json")["median"], read("atari_speed.json")["median"]
    yield ("CartPole on 2 CPU cores, equal updates: steps per second", rate(cartpole["qfleet_8_lanes"]),
           rate(cartpole["stable_baselines3"]))
    yield ("Pong on 2 CPU cores, equal updates: steps per second", rate(pong["qfleet_bf16"]),
           rate(pong["stable_baselines3"]))
    yield "Pong at 18.5 on one H200: seconds from the start of the process", seconds_to_pong(), NOT_MEASURED
    memory = read("replay_memory.json")
    yield ("Replay memory for a million Atari observations", f"{memory['mean_gb_per_million']:.2f} GB",
           f"{ATARI_OBSERVATION_BYTES * 1e6 / 1e9:.0f} GB")
    yield "Resume after a kill, with the same result to the last bit", "yes", "no"


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


def rate(row: dict[str, float]) -> str:
    return number(row["per_s"])


def seconds_to_pong() -> str:
    """Least and greatest time of the runs of the recipe `pong-fast` that solved Pong."""
    times = [run["solved_s"] for run in solved_pong(read("fast_speed.jsonl"))]
    if not times:
        raise UserError("fast_speed.jsonl has no solved run of pong-fast")
    return f"{min(times):.0f} to {max(times):.0f}"
