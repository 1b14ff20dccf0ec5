"""Dense layers from features to values of actions, or to laws of them. Shapes: B items, A actions, Z atoms of a law."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from qfleet.accel.kernels.conv_epilogue import can_fuse_epilogue, fused_epilogue
from qfleet.accel.kernels.value_head import can_fuse_head, fused_head
from qfleet.networks.noisy import Noise, NoisyLinear
from qfleet.networks.norms import Norm, dense_norm


class MLP(nn.Sequential):
    """Linear layers with ReLU; without widths it is the identity.

    With `sigma` the last of them is noisy. Those before it belong to the features, as convolutions do in the papers.
    """

    def __init__(self, features: int, hidden: Sequence[int], norm: Norm, sigma: float | None = None) -> None:
        layers: list[nn.Module] = []
        for i, width in enumerate(hidden):
            noisy = sigma is not None and i == len(hidden) - 1
            linear = NoisyLinear(features, width, sigma or 0.0) if noisy else nn.Linear(features, width)
            layers += [linear, *dense_norm(norm, width), nn.ReLU()]
            features = width
        super().__init__(*layers)
        self.features = features

    def forward(self, x: torch.Tensor, noise: Noise | None = None, last_relu: bool = True) -> torch.Tensor:
        """Without the `last_relu` for somebody who takes it by himself: to do so twice changes nothing."""
        layers = iter(list(self) if last_relu else list(self)[:-1])
        for layer in layers:
            if isinstance(layer, nn.LayerNorm) and x.ndim == 2 and can_fuse_epilogue(layer.weight, x.shape[1]):
                x = fused_epilogue(x, None, layer)
                next(layers, None)  # the ReLU is done
            else:
                x = layer(x, noise) if isinstance(layer, NoisyLinear) else layer(x)
        return x


class Float32Linear(nn.Linear):
    """A linear layer that adds up in float32, whatever its weights are kept in.

    In bfloat16 two values near 10 differ by 0.06 or not at all, which hides which action is better.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if can_fuse_head(x, self):
            return fused_head(x, self)
        return F.linear(x.float(), self.weight.float(), self.bias.float())


class Head(nn.Module):
    """[B, ..., features] -> [B, ..., *shape] in float32: all hidden layers, then one linear layer.

    `shape` is (A,) for values of actions, (A, Z) for laws of Z numbers each.
    """

    def __init__(self, features: int, hidden: Sequence[int], shape: tuple[int, ...], norm: Norm,
                 sigma: float | None = None) -> None:
        super().__init__()
        self.shape, size = shape, torch.Size(shape).numel()
        self.hidden = MLP(features, hidden, norm, sigma)
        width = self.hidden.features
        self.q = Float32Linear(width, size) if sigma is None else NoisyLinear(width, size, sigma)

    @property
    def dtype(self) -> torch.dtype:
        return self.q.weight.dtype

    def forward(self, x: torch.Tensor, noise: Noise | None = None) -> torch.Tensor:
        x = self.hidden(x, noise)
        flat: torch.Tensor = self.q(x.float(), noise) if isinstance(self.q, NoisyLinear) else self.q(x)
        return flat if len(self.shape) == 1 else flat.unflatten(-1, self.shape)


class DuelingHead(nn.Module):
    """[B, ..., features] -> [B, ..., *shape], v + (a − mean a), the mean over actions, item by item (Wang et al. 2016).

    The last hidden layer is split: value and advantage each have one of that width.
    """

    def __init__(self, features: int, hidden: Sequence[int], shape: tuple[int, ...], norm: Norm,
                 sigma: float | None = None) -> None:
        super().__init__()
        shared, own = hidden[:-1], hidden[-1:]
        self.hidden = MLP(features, shared, norm)
        width = self.hidden.features
        self.value = Head(width, own, (1, *shape[1:]), norm, sigma)
        self.advantage = Head(width, own, shape, norm, sigma)

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype

    def forward(self, x: torch.Tensor, noise: Noise | None = None) -> torch.Tensor:
        actions = x.ndim - 1  # their axis
        x = self.hidden(x)
        of_action, of_state = self.advantage.q, self.value.q
        if (
            isinstance(of_action, Float32Linear)
            and isinstance(of_state, Float32Linear)
            and len(self.advantage.shape) == 1
            and can_fuse_head(x, of_action)
        ):
            h, h2 = (head.hidden(x, last_relu=False) for head in (self.advantage, self.value))
            return fused_head(h, of_action, h2, of_state, relu=len(self.value.hidden) > 0)
        advantage = self.advantage(x, noise)
        q: torch.Tensor = self.value(x, noise) + advantage - advantage.mean(actions, keepdim=True)
        return q
