"""Curiosity networks: an embedding of controllable features (inverse dynamics) and random network distillation.

Shapes: B items, D embedding dimensions, A actions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from qfleet.core.env import Leaf
from qfleet.networks.encoder import MakeEncoder
from qfleet.networks.heads import MLP

CLIP = 5.0
LONGEST = 1e6
"""Largest count of rows in the running statistics of observations: the weight of older rows decays beyond it."""


class Trunk(nn.Module):
    """{leaf: [B, ...]} -> [B, width]: an encoder, dense layers and a linear output layer."""

    def __init__(
        self, observation: Mapping[str, Leaf], encoder: MakeEncoder, hidden: Sequence[int], width: int
    ) -> None:
        super().__init__()
        self.encoder = encoder(observation)
        self.hidden = MLP(self.encoder.features, hidden, "none")
        self.out = nn.Linear(hidden[-1] if hidden else self.encoder.features, width)

    def forward(self, obs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        found: torch.Tensor = self.out(self.hidden(self.encoder(obs, self.out.weight.dtype)))
        return found


def flatten_parameters(net: nn.Module) -> torch.Tensor:
    """Copy of all parameters of a network as one float32 vector [P]."""
    return torch.cat([parameter.detach().float().reshape(-1) for parameter in net.parameters()])


def call_with_parameters(net: nn.Module, weights: torch.Tensor, *args: Any) -> Any:
    """Call the network with these parameters [P], in the order of `flatten_parameters`."""
    own = dict(net.named_parameters())
    pieces = weights.split([parameter.numel() for parameter in own.values()])
    given = {name: piece.view(own[name].shape).to(own[name].dtype) for name, piece in zip(own, pieces, strict=True)}
    return functional_call(net, given, args)


def orthogonal_init(module: nn.Module) -> None:
    """Orthogonal initialisation with gain √2 (Burda et al. 2018), which preserves the scale of activations.

    Small outputs would be learned within a few visits, and observations would not stay novel for long enough.
    """
    if isinstance(module, nn.Linear | nn.Conv2d):
        nn.init.orthogonal_(module.weight, 2**0.5)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


class Normaliser(nn.Module):
    """Observations minus their running mean, divided by their running deviation, clipped to ±5 (Burda et al. 2018).

    The statistics are buffers and are published with the weights. `updated_statistics` returns their next values; the
    learner assigns them.
    """

    def __init__(self, observation: Mapping[str, Leaf]) -> None:
        super().__init__()
        self.names = {name: i for i, (name, leaf) in enumerate(observation.items()) if leaf.kind != "category"}
        self.register_buffer("count", torch.zeros(()))
        for name, i in self.names.items():
            self.register_buffer(f"mean_{i}", torch.zeros(observation[name].shape))
            self.register_buffer(f"var_{i}", torch.ones(observation[name].shape))

    def forward(self, obs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = dict(obs)
        for name, i in self.names.items():
            mean, var = self.get_buffer(f"mean_{i}"), self.get_buffer(f"var_{i}")
            found[name] = ((obs[name].float() - mean) / (var + 1e-4).sqrt()).clamp(-CLIP, CLIP)
        return found

    @torch.no_grad()
    def updated_statistics(self, obs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Buffers by name, updated with these observations (Chan et al. 1979)."""
        count = self.get_buffer("count").clamp(max=LONGEST)
        found = {}
        for name, i in self.names.items():
            mean, var, x = self.get_buffer(f"mean_{i}"), self.get_buffer(f"var_{i}"), obs[name].float()
            more = len(x)
            both, step = count + more, x.mean(0) - mean
            found[f"mean_{i}"] = mean + step * more / both
            spread = var * count + x.var(0, unbiased=False) * more + step.square() * count * more / both
            found[f"var_{i}"] = spread / both
            found["count"] = both
        return found


class Curiosity(nn.Module):
    """Embedding, fixed random network and its predictor.

    `embed` is trained to predict the action between two observations (inverse dynamics). `predictor` learns the outputs
    of `random`, which is never trained; its error is large for novel observations (RND, Burda et al. 2018).
    """

    def __init__(self, observation: Mapping[str, Leaf], actions: int, encoder: MakeEncoder, hidden: Sequence[int],
                 embedding: int, outputs: int) -> None:
        super().__init__()
        self.embed = Trunk(observation, encoder, hidden, embedding)
        self.inverse = nn.Sequential(nn.Linear(2 * embedding, 128), nn.ReLU(), nn.Linear(128, actions))
        self.normaliser = Normaliser(observation)
        plain = {name: leaf if leaf.kind == "category" else replace(leaf, dtype="float32", largest=None, symbols=0)
                 for name, leaf in observation.items()}
        self.random = Trunk(plain, encoder, hidden, outputs).apply(orthogonal_init).requires_grad_(False)
        self.predictor = Trunk(plain, encoder, hidden, outputs).apply(orthogonal_init)

    def predict_action(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Logits [B, A] of the action between two embeddings [B, D]."""
        logits: torch.Tensor = self.inverse(torch.cat([one, other], 1))
        return logits.float()

    def rnd_error(self, obs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Mean squared error [B] of the predictor."""
        clean = self.normaliser(obs)
        wanted = self.random(clean).float()
        found: torch.Tensor = (self.predictor(clean).float() - wanted).square().mean(1)
        return found
