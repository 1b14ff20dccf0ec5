"""How long a batch of Atari stacks takes to be drawn, decompressed and stacked, by the threads that do it.

    OMP_NUM_THREADS=1 python benchmarks/decode.py [--threads 1 2 4 8] [--batch 32 256 512] [--steps 100000]
                                                  [--rounds 5] [--out benchmarks/results/decode.json]

Pong is played at random into one replay for each number of threads, all with the same seed; they take turns, and each
figure is the median over rounds of the median of 20 batches. All must draw the same bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import zlib
from pathlib import Path

import numpy as np
import torch
from replay_memory import CHUNK, LANES, fill, make

from qfleet.bench import machine
from qfleet.replay.host import HostReplay
from qfleet.runtime.memory import keep_pages

BATCHES = 20


def timed(replay: HostReplay, batch: int) -> tuple[float, int]:
    """Milliseconds of a batch, in the median, and a checksum of what was drawn."""
    times, seen = [], 0
    for _ in range(BATCHES):
        begin = time.perf_counter()
        sample = replay.sample(batch)
        times.append(1e3 * (time.perf_counter() - begin))
        assert sample is not None
        seen = zlib.crc32(np.ascontiguousarray(sample.rows["obs.image"].numpy()), seen)
    return statistics.median(times), seen


def main() -> None:
    from ale_py.vector_env import AtariVectorEnv

    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[n for n in (1, 2, 4, 8, 16) if n <= cores])
    parser.add_argument("--batch", type=int, nargs="+", default=[32, 256, 512])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_pages()  # as runs do: batches of this size would otherwise be mapped anew each time
    replays = {}
    for threads in args.threads:
        env = AtariVectorEnv("pong", num_envs=LANES, num_threads=cores, use_fire_reset=False)
        layout, replays[threads] = make(max(args.steps, 64 * CHUNK), threads)
        fill(env, layout, replays[threads], args.steps)
        env.close()
    rows: dict[str, dict[str, float]] = {}
    for batch in args.batch:
        found: dict[int, list[float]] = {threads: [] for threads in replays}
        for _ in range(args.rounds):
            seen = set()
            for threads, replay in replays.items():
                spent, checksum = timed(replay, batch)
                found[threads].append(spent)
                seen.add(checksum)
            assert len(seen) == 1, "the number of threads changed what was drawn"
        rows[str(batch)] = {str(threads): round(statistics.median(spent), 3) for threads, spent in found.items()}
        print(batch, rows[str(batch)], flush=True)
    if args.out:
        args.out.write_text(json.dumps({"ms": rows, "steps": args.steps, "machine": machine()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
