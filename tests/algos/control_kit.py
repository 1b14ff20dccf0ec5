"""What tests of continuous control share: a small spec, batches, and every agent by name."""

from __future__ import annotations

import torch
from family_kit import twins

from qfleet.algos import d4pg, ddpg
from qfleet.core.env import Box, EnvSpec, Leaf
from qfleet.core.replay import Sample

__all__ = ["ALGOS", "PICTURES", "SPEC", "TD3", "agent", "batch_of", "config", "twins"]

BOX = Box((2, 1), (-2.0, 0.0), (2.0, 1.0))
SPEC = EnvSpec("toy", {"obs": Leaf((3,), "float32", "vector")}, 0, box=BOX)
PICTURES = EnvSpec("toy", {"obs": Leaf((1, 36, 36), "uint8", "image")}, 0, box=BOX)
ALGOS = {"ddpg": ddpg, "d4pg": d4pg}
SMALL = {"ddpg": {}, "d4pg": {"n_step": 1, "atoms": 7, "v_min": -3.0, "v_max": 4.0}}
TD3 = {"twin": True, "smoothing": 0.2, "policy_delay": 2}


def config(algo: str, **switches):
    return ALGOS[algo].Config(**{"hidden": (8,), **SMALL[algo], **switches})


def agent(algo: str, spec: EnvSpec = SPEC, **switches):
    return ALGOS[algo].build(config(algo, **switches), spec)


def batch_of(rows: int, items: int = 16, seed: int = 0, spec: EnvSpec = SPEC) -> Sample:
    rng = torch.Generator().manual_seed(seed)
    chance = torch.rand(items, rows, generator=rng)
    last = chance < 0.15
    last[:, 0] = False
    obs = torch.randn(items, rows, *spec.observation["obs"].shape, generator=rng)
    if spec is PICTURES:
        obs = (obs * 80).clamp(0, 255).to(torch.uint8)
    return Sample(
        keys=torch.arange(items).numpy(), weight=torch.ones(items),
        rows={"obs.obs": obs, "action": 2 * torch.rand(items, rows, *spec.box.shape, generator=rng) - 1,
              "reward": torch.randn(items, rows, generator=rng) * ~last,
              "discount": (chance < 0.8).float() * ~last, "last": last})
