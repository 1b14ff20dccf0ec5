"""Tables of the pages about agents: what an update costs, and what agents with and without an extension reached."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from learn import MATRIX
from tables import Cell, number, table

Rows = Iterable[tuple[Cell, ...]]

COSTS = {
    "`dqn`": "dqn", "double": "double", "dueling": "dueling", "noisy networks": "noisy", "Munchausen": "munchausen",
    "`c51`": "c51", "`qr`": "qr, 200 quantiles", "`iqn`": "iqn, N = N' = 8, K = 32",
    "`iqn` with K = 8": "iqn, N = N' = K = 8", "recipe `rainbow`": "rainbow",
    "`agent.torso=impala`": "dqn, impala", "recipe `btr`": "btr"}
"""Label in the table -> row of values_cost.json."""

CONTENDERS = {"TD3": "td3", "DDPG": "ddpg"}
TASKS = {"`memory-cue`, delay 40": "memory cue 40", "`tmaze`": "t-maze", "`hidden-cartpole`": "hidden cartpole"}


@table("values_cost.json", "cost")
def update_cost(data: dict[str, Any]) -> Rows:
    """CPU time of an update, relative to DQN without double Q-learning."""
    yield "agent", "cost of an update"
    for label, row in COSTS.items():
        yield label, number(data["rows"][f"{row}, fp32"]["relative"], 1)


@table("continuous_returns.json", "contenders")
def contenders(data: dict[str, Any]) -> Rows:
    """Returns of every seed, and CPU time, of both libraries."""
    yield "agent", "library", "returns of the seeds", "median", "CPU minutes"
    for label, agent in CONTENDERS.items():
        for library, name in (("qfleet", "qfleet"), ("Stable-Baselines3", "stable_baselines3")):
            runs = data["rows"][f"{name}_{agent}"]
            returns = [run["mean_reward"] for run in runs]
            minutes = statistics.median(run["cpu_seconds"] for run in runs) / 60
            recipe = " (no policy delay)" if (name, agent) == ("qfleet", "td3") else ""  # of the recipe `halfcheetah`
            yield (label + recipe, library, " / ".join(number(each) for each in returns),
                   number(statistics.median(returns)), number(minutes))


@table("learn_memory.json", "memory")
def memory_tasks(data: dict[str, Any]) -> Rows:
    """Seeds that solved tasks which need memory, with an LSTM and without."""
    yield "task", "threshold", "R2D2, solved seeds", "DQN, solved seeds"
    for label, row in TASKS.items():
        yield label, f"{MATRIX[row][1]:g}", solved(data, row), solved(data, f"{row}, dqn")


@table("learn_memory.json", "deep sea")
def deep_sea(data: dict[str, Any]) -> Rows:
    """Seeds that found the treasure of DeepSea."""
    yield "task", "NGU, solved seeds", "DQN, solved seeds"
    yield "`deep-sea`, size 20", solved(data, "deep sea 20"), solved(data, "deep sea 20, dqn")


def solved(data: dict[str, Any], row: str) -> str:
    """How many seeds of a row reached its threshold."""
    runs = data["rows"][row]
    return f"{sum(run['mean_reward'] >= MATRIX[row][1] for run in runs)} of {len(runs)}"
