"""Dense heads from features to action values or return distributions. Shapes: B items, A actions, Z atoms."""

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
    """Linear layers with ReLU; the identity without widths.

    With `sigma` only the last layer is noisy: the layers before it count as features, like the convolutions in the
    papers.
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
        """Apply the layers; `last_relu=False` omits the last ReLU for a caller that applies it itself."""
        layers = iter(list(self) if last_relu else list(self)[:-1])
        for layer in layers:
            if isinstance(layer, nn.LayerNorm) and x.ndim == 2 and can_fuse_epilogue(layer.weight, x.shape[1]):
                x = fused_epilogue(x, None, layer)
                next(layers, None)  # the fused kernel includes the ReLU
            else:
                x = layer(x, noise) if isinstance(layer, NoisyLinear) else layer(x)
        return x


class Float32Linear(nn.Linear):
    """Linear layer that computes in float32 for weights of any dtype.

    In bfloat16 two values near 10 differ by at least 0.06 or not at all, which hides the better action.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if can_fuse_head(x, self):
            return fused_head(x, self)
        return F.linear(x.float(), self.weight.float(), self.bias.float())


class Head(nn.Module):
    """[B, ..., features] -> [B, ..., *shape] in float32: all hidden layers, then one linear layer.

    `shape` is (A,) for action values, (A, Z) for distributions with Z outputs each.
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
    """[B, ..., features] -> [B, ..., *shape]: v + (a − mean a), averaged over actions (Wang et al. 2016).

    The last hidden layer is split: value and advantage have one of that width each.
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
        action_axis = x.ndim - 1
        x = self.hidden(x)
        advantage_out, value_out = self.advantage.q, self.value.q
        if (
            isinstance(advantage_out, Float32Linear)
            and isinstance(value_out, Float32Linear)
            and len(self.advantage.shape) == 1
            and can_fuse_head(x, advantage_out)
        ):
            h, h2 = (head.hidden(x, last_relu=False) for head in (self.advantage, self.value))
            return fused_head(h, advantage_out, h2, value_out, relu=len(self.value.hidden) > 0)
        advantage = self.advantage(x, noise)
        q: torch.Tensor = self.value(x, noise) + advantage - advantage.mean(action_axis, keepdim=True)
        return q
