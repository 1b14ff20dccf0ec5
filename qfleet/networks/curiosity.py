"""What curiosity is made of: an embedding of what can be controlled, and a network that is surprised by the new.

Shapes: B items, D numbers of an embedding, A actions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from qfleet.core.env import Leaf
from qfleet.networks.encoder import Encoder
from qfleet.networks.heads import MLP

CLIP = 5.0
LONGEST = 1e6
"""Rows that the running figures of observations remember: older ones fade."""


class Trunk(nn.Module):
    """{leaf: [B, ...]} -> [B, width]: an encoder, dense layers, and a linear one."""

    def __init__(self, observation: Mapping[str, Leaf], torso: str, hidden: Sequence[int], width: int) -> None:
        super().__init__()
        self.encoder = Encoder(observation, torso, "none")
        self.hidden = MLP(self.encoder.features, hidden, "none")
        self.out = nn.Linear(hidden[-1] if hidden else self.encoder.features, width)

    def forward(self, obs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        found: torch.Tensor = self.out(self.hidden(self.encoder(obs, self.out.weight.dtype)))
        return found


def flatten_parameters(net: nn.Module) -> torch.Tensor:
    """All parameters of a network as one float32 vector [P], a copy."""
    return torch.cat([parameter.detach().float().reshape(-1) for parameter in net.parameters()])


def call_with_parameters(net: nn.Module, weights: torch.Tensor, *args: Any) -> Any:
    """What the network would say if its parameters were these [P], as `weights_of` has them."""
    own = dict(net.named_parameters())
    pieces = weights.split([parameter.numel() for parameter in own.values()])
    given = {name: piece.view(own[name].shape).to(own[name].dtype) for name, piece in zip(own, pieces, strict=True)}
    return functional_call(net, given, args)


def orthogonal_init(module: nn.Module) -> None:
    """Weights that keep what goes through them large, as Burda et al. have them: small outputs would be learnt within a
    few visits, and nothing would stay new for long enough to be sought."""
    if isinstance(module, nn.Linear | nn.Conv2d):
        nn.init.orthogonal_(module.weight, 2**0.5)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


class Normaliser(nn.Module):
    """Observations less their running mean, over their running deviation, clipped at ±5 (Burda et al. 2018).

    The figures are buffers: they travel with the weights. `seen` says what they become; who trains assigns it.
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
        """Buffers by name, with these observations in them (Chan et al. 1979)."""
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
    """Three networks: `embed`, trained to tell by which action one observation became the next; a random one that is
    never trained; and one that learns to predict its outputs, which it cannot where nobody was (Burda et al. 2018).
    """

    def __init__(self, observation: Mapping[str, Leaf], actions: int, torso: str, hidden: Sequence[int],
                 embedding: int, outputs: int) -> None:
        super().__init__()
        self.embed = Trunk(observation, torso, hidden, embedding)
        self.inverse = nn.Sequential(nn.Linear(2 * embedding, 128), nn.ReLU(), nn.Linear(128, actions))
        self.normaliser = Normaliser(observation)
        plain = {name: leaf if leaf.kind == "category" else replace(leaf, dtype="float32")
                 for name, leaf in observation.items()}
        self.random = Trunk(plain, torso, hidden, outputs).apply(orthogonal_init).requires_grad_(False)
        self.predictor = Trunk(plain, torso, hidden, outputs).apply(orthogonal_init)

    def predict_action(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Logits [B, A] of the action between two embeddings [B, D]."""
        logits: torch.Tensor = self.inverse(torch.cat([one, other], 1))
        return logits.float()

    def rnd_error(self, obs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The mean squared error [B] of the prediction."""
        clean = self.normaliser(obs)
        wanted = self.random(clean).float()
        found: torch.Tensor = (self.predictor(clean).float() - wanted).square().mean(1)
        return found
