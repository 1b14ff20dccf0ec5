"""Prioritised sample + update of 512 from a million, beside cpprb, on one core.

    OMP_NUM_THREADS=1 python benchmarks/per.py [--out results/per.json]

Both draw stratified indices, compute importance weights and gather the same small transition (observations of four
floats at both ends, action, reward, discount or done); then both take back new priorities. Turns of 100
rounds alternate, so that both meet the same disturbances and neither works in a cache filled by the other. cpprb is not
a dependency: without it only our own figure is printed.
Bars: at most 150 us for sample + update, and at least 3 times cpprb.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from qfleet.core.env import EnvSpec, Leaf
from qfleet.core.replay import Chunk, Window
from qfleet.replay.config import ReplayConfig
from qfleet.replay.host_store import HostReplay
from qfleet.replay.layout import Layout

SPEC = EnvSpec("vector", {"obs": Leaf((4,), "float32", "vector")}, num_actions=2)
CHUNK, TURN = 64, 100
Turn = Callable[[np.ndarray], tuple[float, float]]


def ours(capacity: int, batch: int, rng: np.random.Generator) -> Turn:
    """A full HostReplay; the returned function samples, updates, and says how long each took."""
    layout = Layout(SPEC, Window(future=1), CHUNK)
    cfg = ReplayConfig(capacity=capacity, min_steps=0, samples_per_insert=1e12, chunk_steps=CHUNK, alpha=0.6)
    replay = HostReplay(layout, cfg, seed=0, device=torch.device("cpu"))
    for _ in range(capacity // CHUNK):
        rows = {c.name: rng.random((layout.rows, *c.shape)).astype(c.dtype) for c in layout.columns}
        rows["last"][:] = False
        replay.clock.count_steps(CHUNK)
        replay.add(Chunk(rows, np.ones(CHUNK, bool)), rng.random(CHUNK) + 0.01)

    def turn(priority: np.ndarray) -> tuple[float, float]:
        begin = time.perf_counter()
        sample = replay.sample(batch)
        middle = time.perf_counter()
        assert sample is not None
        replay.update(sample.keys, priority)
        return middle - begin, time.perf_counter() - middle

    return turn


def theirs(capacity: int, batch: int, rng: np.random.Generator) -> Turn | None:
    """The same of cpprb, if it is installed."""
    try:
        from cpprb import PrioritizedReplayBuffer
    except ImportError:
        return None
    columns = {"obs": {"shape": 4}, "act": {"dtype": np.int32}, "rew": {}, "next_obs": {"shape": 4}, "done": {}}
    replay = PrioritizedReplayBuffer(capacity, columns, alpha=0.6)
    for at in range(0, capacity, 1000):
        count = min(1000, capacity - at)
        replay.add(obs=rng.random((count, 4)), act=rng.integers(0, 2, count), rew=rng.random(count),
                   next_obs=rng.random((count, 4)), done=np.zeros(count), priorities=rng.random(count) + 0.01)

    def turn(priority: np.ndarray) -> tuple[float, float]:
        begin = time.perf_counter()
        sample = replay.sample(batch, beta=0.4)
        middle = time.perf_counter()
        replay.update_priorities(sample["indexes"], priority)
        return middle - begin, time.perf_counter() - middle

    return turn


def figures(times: list[tuple[float, float]]) -> dict[str, float]:
    """Medians in microseconds; `quiet_us` is the tenth percentile, what an undisturbed core does."""
    sample, update = (np.array(column) * 1e6 for column in zip(*times, strict=True))
    return {"sample_us": round(float(np.median(sample)), 1), "update_us": round(float(np.median(update)), 1),
            "both_us": round(float(np.median(sample + update)), 1),
            "quiet_us": round(float(np.percentile(sample + update, 10)), 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capacity", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    makers = {"qfleet": ours, "cpprb": theirs}
    turns = {name: turn for name, make in makers.items() if (turn := make(options.capacity, options.batch, rng))}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in turns}
    for _ in range(options.rounds // TURN):
        for name, turn in turns.items():
            times[name] += [turn(rng.random(options.batch) + 0.01) for _ in range(TURN)]
    result: dict[str, object] = {"capacity": options.capacity, "batch": options.batch, "rounds": options.rounds,
                                 "load": round(os.getloadavg()[0], 2)}
    measured = {name: figures(values[len(values) // 10:]) for name, values in times.items()}
    result |= measured
    result["bar_us"], result["bar_ratio"] = 150, 3
    if "cpprb" in measured:
        result["ratio"] = round(measured["cpprb"]["both_us"] / measured["qfleet"]["both_us"], 2)
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
