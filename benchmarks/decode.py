"""How long a prioritised batch of Atari stacks takes to be drawn, decompressed and stacked, by the threads that do it.

    OMP_NUM_THREADS=1 python benchmarks/decode.py [--threads 1 2] [--batch 32 512] [--steps 20000] [--turns 60]
                                                  [--out benchmarks/results/decode.json]

Pong is played at random into one replay. Numbers of threads take turns at the same draws and must read the same bytes.
Medians in milliseconds: `wall`; `cpu`, of all threads together; and `path`, what the caller's thread computes alone and
then the busiest one of all: the wall clock where every thread has a core and never waits for another.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from replay_memory import CHUNK, LANES, fill, make
from speed import describe_machine

from qfleet.process.memory import retain_freed_memory
from qfleet.replay.decode import Decoder
from qfleet.replay.host_store import HostReplay


class Watched(Decoder):
    """Notes the CPU seconds of each thread in a batch."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.spent: dict[int, float] = {}

    def _work(self, *args: Any) -> None:
        begin = time.thread_time()
        super()._work(*args)
        self.spent[threading.get_ident()] = time.thread_time() - begin


def timed(replay: HostReplay, decoder: Watched, batch: int) -> tuple[list[float], int]:
    """Milliseconds of a batch, by wall clock, in all and along the longest path, and a checksum of what was read."""
    replay._gatherer._decoder = decoder
    decoder.spent.clear()
    begin = time.perf_counter(), time.process_time(), time.thread_time()
    sample = replay.sample(batch)
    wall, cpu, own = (now() - then for now, then in
                      zip((time.perf_counter, time.process_time, time.thread_time), begin, strict=True))
    assert sample is not None
    path = own - decoder.spent[threading.get_ident()] + max(decoder.spent.values())
    return [1e3 * wall, 1e3 * cpu, 1e3 * path], zlib.crc32(sample.rows["obs.image"].numpy())


def main() -> None:
    from ale_py.vector_env import AtariVectorEnv

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batch", type=int, nargs="+", default=[32, 512])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    retain_freed_memory()  # as runs do: batches of this size would otherwise be mapped anew each time
    env = AtariVectorEnv("pong", num_envs=LANES, num_threads=1, use_fire_reset=False)
    layout, replay = make(max(options.steps, 64 * CHUNK))
    fill(env, layout, replay, options.steps)
    env.close()
    decoders = {threads: Watched(layout, replay._data, replay._ends, threads) for threads in options.threads}
    rows: dict[str, dict[str, dict[str, float]]] = {}
    for batch in options.batch:
        found: dict[int, list[list[float]]] = {threads: [] for threads in decoders}
        for _ in range(options.turns):
            state, seen = replay._random_state(), set()
            for threads, decoder in decoders.items():
                replay._restore_random(state)
                spent, checksum = timed(replay, decoder, batch)
                found[threads].append(spent)
                seen.add(checksum)
            assert len(seen) == 1, "the number of threads changed what was read"
        rows[str(batch)] = {str(threads): {name: round(float(value), 2) for name, value in
                                           zip(("wall", "cpu", "path"), np.median(spent, axis=0), strict=True)}
                            for threads, spent in found.items()}
        print(batch, rows[str(batch)], flush=True)
    if options.out:
        settings = {"steps": options.steps, "turns": options.turns, "machine": describe_machine()}
        options.out.write_text(json.dumps({"ms": rows} | settings, indent=1) + "\n")


if __name__ == "__main__":
    main()
