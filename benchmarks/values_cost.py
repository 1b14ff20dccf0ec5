"""What an update of each member of the value family costs, relative to plain DQN.

    python benchmarks/values_cost.py [--rounds 15] [--device cpu] [--out benchmarks/results/values_cost.json]

Batches of 32 random Atari stacks (84 × 84 × 4), 6 actions, one hidden layer of 512: loss, gradient, optimizer and
target, as the learner makes them, without the replay. All variants take turns, a few updates each per round, and the
median over rounds counts: of one thread's CPU time, so that a busy machine matters little, or of wall time on a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from speed import describe_machine

from qfleet.config import plugin_module
from qfleet.core.env import EnvSpec, Leaf
from qfleet.core.replay import Sample
from qfleet.learner.learner import Learner, LearnerConfig
from qfleet.learner.weight_store import Mailbox

EIGHT = {"samples": 8, "target_samples": 8, "policy_samples": 8}
BTR = {**EIGHT, "n_step": 3, "noisy": True, "dueling": True, "munchausen": True, "torso": "impala", "torso_width": 2,
       "torso_pool": 6, "spectral_norm": True}
VARIANTS: dict[str, tuple[str, dict]] = {
    "dqn": ("dqn", {"double": False}),
    "double": ("dqn", {}),
    "dueling": ("dqn", {"double": False, "dueling": True}),
    "noisy": ("dqn", {"double": False, "noisy": True}),
    "munchausen": ("dqn", {"munchausen": True}),
    "c51": ("c51", {"double": False}),
    "qr, 200 quantiles": ("qr", {"double": False}),
    "iqn, N = N' = K = 8": ("iqn", {"double": False, **EIGHT}),
    "iqn, N = N' = 8, K = 32": ("iqn", {"double": False}),
    "iqn, double, N = N' = K = 8": ("iqn", EIGHT),
    "rainbow": ("c51", {"n_step": 3, "dueling": True, "noisy": True}),
    "dqn, impala": ("dqn", {"double": False, "torso": "impala"}),
    "btr": ("iqn", BTR),
}
SPEC = EnvSpec("atari", {"obs": Leaf((4, 84, 84), "uint8", "image", stack=4)}, num_actions=6)


class Repeating:
    """A replay that always holds the same batch."""

    steps = 0

    def __init__(self, rows: int, device: torch.device, batch: int = 32) -> None:
        rng = torch.Generator().manual_seed(0)
        zeros = torch.zeros(batch, rows)
        columns = {
            "obs.obs": torch.randint(256, (batch, rows, 4, 84, 84), generator=rng, dtype=torch.uint8),
            "action": torch.randint(6, (batch, rows), generator=rng, dtype=torch.int32), "reward": zeros + 0.1,
            "discount": zeros + 1, "last": zeros > 0}
        self.batch = Sample(np.arange(batch), torch.ones(batch, device=device),
                            {name: value.to(device) for name, value in columns.items()})

    def sample(self, n: int) -> Sample:
        return self.batch

    def update(self, keys: np.ndarray, priority: np.ndarray) -> None:
        """Nothing is kept."""


class Deaf:
    """Metrics for nobody."""

    def write(self, values: object) -> None: ...
    def count(self, name: str, by: int = 1) -> None: ...


def learner(algo: str, switches: dict, precision: str, device: torch.device) -> Learner:
    module = plugin_module("qfleet.algos", algo)
    agent = module.build(module.Config(**switches), SPEC)
    made = Learner(agent, Repeating(agent.window.length, device), Mailbox(), Deaf(),
                   LearnerConfig(precision=precision, publish_period_updates=10**9), 0, device)
    made.max_updates_per_step = 3
    return made


def seconds(made: Learner, device: torch.device) -> float:
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    begin = clock()
    made.step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (clock() - begin) / made.max_updates_per_step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", nargs="*", default=["fp32"], choices=["fp32", "bf16"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device, rows = torch.device(args.device), {}
    torch.set_num_threads(1)
    for precision in args.precision:
        made = {name: learner(*variant, precision, device) for name, variant in VARIANTS.items()}
        for each in made.values():
            each.step()
        taken = {name: [] for name in made}
        for _ in range(args.rounds):
            for name, each in made.items():
                taken[name].append(seconds(each, device))
        plain = statistics.median(taken["dqn"])
        for name, times in taken.items():
            median = statistics.median(times)
            rows[f"{name}, {precision}"] = {"ms": round(1000 * median, 3), "relative": round(median / plain, 3)}
            print(f"{name:30} {precision}  {1000 * median:9.2f} ms  {median / plain:6.2f} x", flush=True)
    if args.out:
        gpu = torch.cuda.get_device_name() if device.type == "cuda" else None
        document = {"rows": rows, "rounds": args.rounds, "gpu": gpu, "machine": describe_machine()}
        args.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
