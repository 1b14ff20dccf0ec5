"""A network's parameters as one vector: copies, clipping and optimizer steps become single operations.

Precision lives here, too: the optimizer moves `master` (float32); the network computes with `data`, which is the same
vector in float32 runs and a bfloat16 copy beside it in bfloat16 runs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn


class Flat:
    """The parameters of `net`, re-seated as views of one vector.

    Invariant: `master` holds the truth in float32; after `sync`, `data` equals it rounded to `dtype`. `grad` is the
    float32 gradient of the last backward pass, once `gather` has been called.
    """

    def __init__(self, net: nn.Module, dtype: torch.dtype = torch.float32) -> None:
        self.net = net.to(dtype)
        self.parameters = list(net.parameters())
        device = self.parameters[0].device
        self.shapes = {name: parameter.shape for name, parameter in net.named_parameters()}
        size = sum(parameter.numel() for parameter in self.parameters)
        self.data = torch.empty(size, dtype=dtype, device=device)
        for parameter, room in zip(self.parameters, self._named(self.data).values(), strict=True):
            room.copy_(parameter.detach())
            parameter.data = room
        self.master = self.data if dtype == torch.float32 else self.data.float()
        trained = self.parameters[0].requires_grad
        self.grad = torch.zeros(size if trained else 0, device=device)
        self._grads = list(self._named(self.grad).values()) if trained else []

    def forget(self) -> None:
        """Before a backward pass: let autograd hand over its own buffers instead of adding to ours."""
        for parameter in self.parameters:
            parameter.grad = None

    def gather(self) -> torch.Tensor:
        """After a backward pass: the gradient as one float32 vector; a parameter that took no part has zeros."""
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self.parameters]
        torch._foreach_copy_(self._grads, grads)
        return self.grad

    def sync(self) -> None:
        """Let the network compute with what the optimizer wrote."""
        if self.data is not self.master:
            self.data.copy_(self.master)

    def state(self) -> dict[str, torch.Tensor]:
        """A float32 copy of all weights and buffers, by name."""
        return self._named(self.master.clone()) | {k: v.clone() for k, v in self.net.named_buffers()}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take weights and buffers, by name; every name and shape must fit."""
        views = self._named(self.master) | dict(self.net.named_buffers())
        if set(views) != set(state):
            raise ValueError(f"weights differ in {sorted(set(views) ^ set(state))}")
        for name, view in views.items():
            if view.shape != state[name].shape:
                raise ValueError(f"weights of {name} are {tuple(state[name].shape)}, not {tuple(view.shape)}")
            view.copy_(state[name])
        self.sync()

    def follow(self, other: Flat, tau: float = 1.0) -> None:
        """Move towards another network: all the way (a copy), or a step of size tau."""
        if tau == 1.0:
            self.master.copy_(other.master)
        else:
            self.master.lerp_(other.master, tau)
        for mine, theirs in zip(self.net.buffers(), other.net.buffers(), strict=True):
            mine.copy_(theirs)
        self.sync()

    def _named(self, vector: torch.Tensor) -> dict[str, torch.Tensor]:
        views = vector.split([shape.numel() for shape in self.shapes.values()])
        return {name: view.view(shape) for (name, shape), view in zip(self.shapes.items(), views, strict=True)}
