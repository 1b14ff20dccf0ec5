"""What tests of the value family share: a small spec, batches, and every member by name."""

from __future__ import annotations

import typing

import torch

from qfleet.algos import c51, dqn, hlgauss, iqn, qr
from qfleet.core.env import EnvSpec, Leaf
from qfleet.core.replay import Sample
from qfleet.networks.torsos import Torso

SPEC = EnvSpec("toy", {"obs": Leaf((3,), "float32", "vector")}, num_actions=4)
PICTURES = EnvSpec("toy", {"obs": Leaf((1, 36, 36), "uint8", "image")}, num_actions=4)
ALGOS = {"dqn": dqn, "c51": c51, "hlgauss": hlgauss, "qr": qr, "iqn": iqn}
SMALL = {"dqn": {}, "c51": {"atoms": 7, "v_min": -3.0, "v_max": 4.0}, "qr": {"quantiles": 5},
         "hlgauss": {"atoms": 7, "v_min": -3.0, "v_max": 4.0},
         "iqn": {"samples": 3, "target_samples": 4, "policy_samples": 6, "cosines": 5}}
"""Little of everything, so that naive loops are quick."""


class Scaled(torch.nn.Module):
    """An encoder of a user: all leaves as one row, times a factor."""

    def __init__(self, observation: dict[str, Leaf], scale: float = 3.0) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, obs: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.cat([leaf.flatten(1) for leaf in obs.values()], 1) * self.scale


OWN_ENCODER = {"encoder": "family_kit:Scaled"}


def config(algo: str, **switches):
    return ALGOS[algo].Config(**{"hidden": (8,), **SMALL[algo], **switches})


def agent(algo: str, spec: EnvSpec = SPEC, **switches):
    return ALGOS[algo].build(config(algo, **switches), spec)


def twins(made, seed: int = 1):
    """An online and a target network that differ."""
    torch.manual_seed(seed)
    return made.network(), made.network().requires_grad_(False).eval()


def batch_of(rows: int, items: int = 16, seed: int = 0, spec: EnvSpec = SPEC) -> Sample:
    rng = torch.Generator().manual_seed(seed)
    chance = torch.rand(items, rows, generator=rng)
    last = chance < 0.15
    last[:, 0] = False
    shape = spec.observation["obs"].shape
    obs = torch.randn(items, rows, *shape, generator=rng)
    if spec is PICTURES:
        obs = (obs * 80).clamp(0, 255).to(torch.uint8)
    return Sample(
        keys=torch.arange(items).numpy(), weight=torch.ones(items),
        rows={"obs.obs": obs, "action": torch.randint(4, (items, rows), generator=rng, dtype=torch.int32),
              "reward": torch.randn(items, rows, generator=rng) * ~last,
              "discount": (chance < 0.8).float() * ~last, "last": last})


def changes_of(cfg, numbers, skip):
    """(name, value) of all options of an agent: both of a boolean, all of a choice, another number."""
    for name, field in type(cfg).model_fields.items():
        default = getattr(cfg, name)
        if name in skip:
            continue
        if field.annotation is bool:
            yield name, not default
        elif typing.get_origin(field.annotation) is typing.Literal:
            yield from ((name, value) for value in typing.get_args(field.annotation) if value != default)
        elif name == "torso":
            yield from ((name, value) for value in typing.get_args(Torso)[1].names() if value not in ("auto", "nature"))
        else:
            yield name, numbers[name]
