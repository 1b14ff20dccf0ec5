"""A network of your own for vectors: learned Fourier features (Li and Pathak 2021), with all switches of Rainbow on.

    qfleet train cartpole agent.encoder=custom_encoder:Fourier agent.encoder_kwargs.waves=64 agent.double=true \
        agent.n_step=3 agent.dueling=true agent.noisy=true explore.kind=constant explore.epsilon=0 replay.alpha=0.5

Shapes: B items, D numbers of an observation, W waves.
"""

import math

import torch
from torch import nn


class Fourier(nn.Module):
    """{leaf: [B, ...]} -> features [B, D + 2W]: the observation, and sine and cosine of linear functions of it."""

    def __init__(self, observation, waves: int = 128, scale: float = 0.1) -> None:
        """Build the layer for these leaves (`qfleet.core.env.Leaf`).

        Args:
            observation: description of each leaf by name; a Box has the single leaf `obs`
            waves: number of frequencies, which are learned
            scale: standard deviation of the initial frequencies; larger values let values change faster
        """
        super().__init__()
        if any(leaf.kind != "vector" for leaf in observation.values()):
            raise ValueError("Fourier features are for vector observations")
        numbers = sum(math.prod(leaf.shape) for leaf in observation.values())
        self.waves = nn.Linear(numbers, waves)
        nn.init.normal_(self.waves.weight, std=scale)

    def forward(self, obs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Vectors arrive as floats, in the dtype that the network computes in."""
        x = torch.cat([leaf.flatten(1) for leaf in obs.values()], 1)
        angles = math.pi * self.waves(x)
        return torch.cat([x, angles.sin(), angles.cos()], 1)
