"""Policy and critic networks for continuous control. Shapes: B items, A action dimensions, Z outputs of a critic."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn
from torch.func import functional_call

from qfleet.networks.encoder import AnyEncoder
from qfleet.networks.heads import Head
from qfleet.networks.norms import Norm

SMALL = 3e-3
"""Bound of the initial weights of the policy's last layer (Lillicrap et al. 2016). Larger weights start some actions at
their bounds, where the gradient of tanh vanishes.
"""


class PolicyNetwork(nn.Module):
    """{leaf: [B, ...]} -> actions [B, A] within ±1."""

    def __init__(self, encoder: AnyEncoder, hidden: Sequence[int], actions: int) -> None:
        super().__init__()
        self.encoder, self.head = encoder, Head(encoder.features, hidden, (actions,), "none")
        for parameter in self.head.q.parameters():
            nn.init.uniform_(parameter, -SMALL, SMALL)

    def forward(self, obs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return torch.tanh(self.head(self.encoder(obs, self.head.dtype)))


class Critic(nn.Module):
    """Return distribution of an action: `distribution(features, action)` [B, Z]; Z = 1 for a scalar value."""

    def __init__(self, encoder: AnyEncoder, hidden: Sequence[int], actions: int, outputs: int, norm: Norm) -> None:
        super().__init__()
        self.encoder, self.head = encoder, Head(encoder.features + actions, hidden, (outputs,), norm)

    def features(self, obs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        found: torch.Tensor = self.encoder(obs, self.head.dtype)
        return found

    def distribution(self, features: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(torch.cat([features, action.to(features.dtype)], 1))
        return found

    def frozen_distribution(self, features: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        """Distribution for the policy loss: its gradient reaches the action, not this critic or its encoder."""
        seen = features.detach()
        fixed = {name: parameter.detach() for name, parameter in self.head.named_parameters()}
        found: torch.Tensor = functional_call(self.head, fixed, (torch.cat([seen, action.to(seen.dtype)], 1),))
        return found


class ActorCritic(nn.Module):
    """Policy and critics."""

    def __init__(self, policy: PolicyNetwork, critics: Sequence[Critic]) -> None:
        super().__init__()
        self.policy, self.critics = policy, nn.ModuleList(critics)


def make_actor_critic(
    encoder: Callable[[], AnyEncoder], hidden: Sequence[int], actions: int, outputs: int, norm: Norm,
    critics: int) -> ActorCritic:
    """Build policy and critics, each with its own encoder.

    The policy's dense layers have no `norm`: on HalfCheetah it cost time without a benefit.
    """
    return ActorCritic(PolicyNetwork(encoder(), hidden, actions),
                       [Critic(encoder(), hidden, actions, outputs, norm) for _ in range(critics)])
