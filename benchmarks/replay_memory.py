"""Memory of a million Atari observations, measured, and the time of a prioritised batch of 32 from them.

    OMP_NUM_THREADS=1 python benchmarks/replay_memory.py [--steps 1000000] [--games pong boxing] [--out results/x.json]

Every game is played in a process of its own by AtariVectorEnv: random actions, each held for a few steps, so that play
wanders. The figure is the growth of the resident set from just before the replay is made until it is full, everything
included, the actor's chunker too; with fewer --steps it is extrapolated to a million. Bars: mean at most 0.3 GB, worst
at most 0.5 GB; a batch decoded and stacked in at most 2.5 ms on one core.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from qfleet.core.env import EnvSpec, Leaf
from qfleet.core.replay import Window
from qfleet.replay.chunker import Chunker
from qfleet.replay.config import ReplayConfig
from qfleet.replay.host_store import HostReplay
from qfleet.replay.layout import Layout

GAMES = ("pong", "breakout", "space_invaders", "seaquest", "zaxxon", "wizard_of_wor", "asterix", "qbert",
         "montezuma_revenge", "boxing")
LANES, CHUNK, BATCH, HOLD = 16, 64, 32, 0.3


def resident() -> int:
    """Bytes of this process that are in memory."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def make(capacity: int) -> tuple[Layout, HostReplay]:
    spec = EnvSpec("atari", {"image": Leaf((4, 84, 84), "uint8", "image", stack=4)}, num_actions=18)
    layout = Layout(spec, Window(future=1), CHUNK)
    cfg = ReplayConfig(capacity=capacity, min_steps=0, samples_per_insert=1e12, chunk_steps=CHUNK, alpha=0.6)
    return layout, HostReplay(layout, cfg, seed=0, device=torch.device("cpu"))


def fill(env, layout: Layout, replay: HostReplay, steps: int) -> float:
    """Play until the replay holds `steps`; return the seconds spent on storing."""
    chunker, rng = Chunker(layout, LANES), np.random.default_rng(0)
    obs, _ = env.reset(seed=0)
    action, last, spent = np.zeros(LANES, np.int64), np.zeros(LANES, bool), 0.0
    chunks = 0
    while chunks < steps // CHUNK:
        fresh = rng.integers(0, env.single_action_space.n, LANES)
        action = np.where(rng.random(LANES) < HOLD, fresh, action)
        after, reward, terminated, truncated, _ = env.step(action)
        begin = time.perf_counter()
        for _, chunk in chunker.append({"image": obs}, action, reward, 1.0 - terminated, last):
            replay.clock.count_steps(CHUNK)
            replay.add(chunk, rng.random(layout.starts) + 0.01)
            chunks += 1
        spent += time.perf_counter() - begin
        obs, last = after, terminated | truncated
    return spent


def measure(game: str, steps: int) -> dict[str, float | str]:
    """One game, in this process."""
    from ale_py.vector_env import AtariVectorEnv

    torch.set_num_threads(1)
    env = AtariVectorEnv(game, num_envs=LANES, num_threads=1, repeat_action_probability=0.25, reward_clipping=False,
                         use_fire_reset=False)
    layout, warm = make(CHUNK * 32)  # what is loaded once, whatever the size: compiled kernels, codec, environments
    fill(env, layout, warm, CHUNK * 32)
    warm.sample(BATCH)
    del warm
    before = resident()
    layout, replay = make(steps)
    spent = fill(env, layout, replay, steps)
    grown = resident() - before
    waiting = LANES * layout.rows * sum(column.row_bytes for column in layout.columns)  # the chunker's, at any size
    times = []
    for _ in range(300):
        begin = time.perf_counter()
        replay.sample(BATCH)
        times.append(time.perf_counter() - begin)
    env.close()
    return {"game": game, "rss_gb": round(grown / 1e9, 4),
            "gb_per_million": round(((grown - waiting) / steps * 1e6 + waiting) / 1e9, 4),
            "counted_gb": round(replay.nbytes / 1e9, 4), "store_us_per_step": round(spent / steps * 1e6, 2),
            "sample_ms": round(float(np.median(times)) * 1e3, 3),
            "sample_ms_quiet": round(float(np.percentile(times, 10)) * 1e3, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--games", nargs="+", default=GAMES)
    parser.add_argument("--one", help="measure one game in this process and print its line")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.steps)))
        return
    rows = []
    for game in options.games:
        command = [sys.executable, __file__, "--one", game, "--steps", str(options.steps)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=7200)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(json.dumps(rows[-1]), flush=True)
    per_million = [row["gb_per_million"] for row in rows]
    text = json.dumps({"steps": options.steps, "mean_gb_per_million": round(float(np.mean(per_million)), 4),
                       "worst_gb_per_million": max(per_million), "worst_sample_ms": max(r["sample_ms"] for r in rows),
                       "bars": {"mean_gb": 0.3, "worst_gb": 0.5, "sample_ms": 2.5}, "games": rows}, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
