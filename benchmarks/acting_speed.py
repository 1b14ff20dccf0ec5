"""Acting with the Nature CNN (bf16) and storing, against the bare emulators with random actions, in one run.

    python benchmarks/acting_speed.py [--rounds 3] [--steps 8000] [--out benchmarks/results/acting_speed.json]

Both step 16 lanes of Pong on all cores: theirs in one group, ours in two that take turns, so that one is emulated while
the network chooses for the other. Ours are the actors of a real run: batched inference, chunks, compression, replay; no
learner; one thread for the network, one per group for the emulators. Steps/s after warm-up, alternating in fresh
processes. Needs `pip install qfleet[atari]`.
"""

from __future__ import annotations

import sys
import time

import numpy as np
from side_by_side import Rate, main

LANES, GROUPS, WARM_UP = 16, 2, 1_000


def ours(steps: int) -> Rate:
    import torch

    from qfleet import recipe
    from qfleet.assemble import cast_of, make_env, plan_of, settle
    from qfleet.runtime.cell import Outside
    from qfleet.runtime.inline import Inline
    from qfleet.runtime.memory import keep_pages

    keep_pages()
    cfg = recipe.resolve("pong", [f"actors={GROUPS}", f"env.lanes={LANES // GROUPS}", "learner.precision=bf16",
                                  "run.threads=1", "env.threads=1", "replay.capacity=100000"]).config
    env = make_env(cfg.env, LANES // GROUPS)
    cfg = settle(cfg, env.spec)
    torch.set_num_threads(cfg.run.threads or 1)
    nothing = Outside([], lambda snapshot: None, lambda *best: True, lambda *bad: None)
    actors = Inline(cast_of(cfg, env), plan_of(cfg), nothing).actors
    for index, actor in enumerate(actors):
        actor.begin([index * LANES + lane for lane in range(LANES // GROUPS)])
    return _timed(lambda: [actor.step() for actor in actors], steps)


def emulators(steps: int) -> Rate:
    from ale_py.vector_env import AtariVectorEnv

    env, rng = AtariVectorEnv("pong", LANES, reward_clipping=False), np.random.default_rng(0)
    env.reset(seed=0)
    return _timed(lambda: env.step(rng.integers(0, 6, LANES)), steps)


def _timed(step, steps: int) -> Rate:
    for _ in range(WARM_UP // LANES):
        step()
    first = (time.perf_counter(), time.process_time(), 0)
    for _ in range(steps // LANES):
        step()
    return Rate.between(first, (time.perf_counter(), time.process_time(), steps // LANES * LANES))


if __name__ == "__main__":
    sys.exit(main(__doc__, {"qfleet": ours, "ale_random_actions": emulators}, default_steps=8_000))
