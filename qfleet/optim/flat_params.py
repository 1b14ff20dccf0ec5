"""A network's parameters as one vector, so that copies, clipping and optimizer steps are single operations.

Mixed precision: the optimizer updates `master` (float32); the network computes with `data`, which
is the same vector in float32 runs and a bfloat16 copy in bfloat16 runs, on a GPU in the layout of
`accel/kernels/aligned.py`. float64 networks, used in tests, stay float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType

import torch
from torch import nn

from qfleet.accel.kernels.aligned import aligned_views, gather_index, scatter_index, uses_aligned_copy
from qfleet.accel.kernels.gradients import gather_bf16
from qfleet.core.agent import ParamGroup
from qfleet.core.errors import UserError
from qfleet.optim.optimizer import param_shapes_of, param_slices_of


class Flat:
    """The parameters of `net` as views of one vector; buffers (running statistics) are left as they are.

    Invariant: `master` holds the float32 weights; after `copy_to_network`, `data` equals them
    rounded to `dtype`. `grad` is the float32 gradient last gathered and `grad_views` its views, one
    per parameter. `param_slices` are the parameters with their own `ParamGroup`, `param_shapes` all of them.
    """

    def __init__(self, net: nn.Module, dtype: torch.dtype = torch.float32,
                 groups: Mapping[str, ParamGroup] = MappingProxyType({})) -> None:
        self.net, self.param_slices, self.param_shapes = net, param_slices_of(net, groups), param_shapes_of(net)
        self.parameters = list(net.parameters())
        if not self.parameters:
            raise UserError("the network has no parameters, so there is nothing to train: check agent.torso and "
                            "agent.hidden")
        device = self.parameters[0].device
        self.shapes = {name: parameter.shape for name, parameter in net.named_parameters()}
        size = sum(parameter.numel() for parameter in self.parameters)
        self._gather_index: torch.Tensor | None = None  # index in `master` of each element of `data`
        same = dtype in (torch.float32, torch.float64)
        if uses_aligned_copy(device, dtype):
            self._gather_index = gather_index(list(self.shapes.values())).to(device)
            self.data = torch.empty(len(self._gather_index), dtype=dtype, device=device)
            views = aligned_views(self.data, list(self.shapes.values()))
        else:
            self.data = torch.empty(size, dtype=dtype, device=device)
            views = list(self.named(self.data).values())
        self.master = torch.empty(size, dtype=dtype if same else torch.float32, device=device)
        for parameter, view, master in zip(self.parameters, views, self.named(self.master).values(), strict=True):
            view.copy_(parameter.detach())
            master.copy_(view)
            parameter.data = view
        self.master = self.data if same else self.master
        self._buffers = dict(net.named_buffers())
        self._views = self.named(self.master) | self._buffers
        trained = any(parameter.requires_grad for parameter in self.parameters)
        self.grad = torch.zeros(size if trained else 0, dtype=self.master.dtype, device=device)
        self.grad_views = list(self.named(self.grad).values()) if trained else []

    def gather(self, grads: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Gather one gradient per parameter into the float32 vector `grad`; zeros for unused parameters."""
        if not gather_bf16(grads, list(self.shapes.values()), self.grad):
            scatter(grads, self.grad_views)
        return self.grad

    @cached_property
    def bf16_target(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """`data` and, for each element of `master`, its index there (int32); None without a GPU copy."""
        if self._gather_index is None:
            return None
        return self.data, scatter_index(list(self.shapes.values())).to(self.data.device)

    def copy_to_network(self) -> None:
        """Copy the optimizer's weights to the network's."""
        if self._gather_index is not None:
            self.data.copy_(self.master.index_select(0, self._gather_index))
        elif self.data is not self.master:
            self.data.copy_(self.master)

    def state(self, master: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Float32 copy of all weights and buffers, by name; with `master`, the weights are views of that vector."""
        vector = self.master.clone() if master is None else master
        return self.named(vector) | {name: value.clone() for name, value in self._buffers.items()}

    def load(self, state: Mapping[str, torch.Tensor], optional: Sequence[str] = ()) -> None:
        """Load weights and buffers by name; all names and shapes must match. `optional` buffers may be missing."""
        state = {name: self._buffers[name] for name in optional} | dict(state)
        if self._views.keys() != state.keys():
            raise ValueError(f"weights differ in {sorted(self._views.keys() ^ state.keys())}")
        for name, view in self._views.items():
            if view.shape != state[name].shape:
                raise ValueError(f"weights of {name} are {tuple(state[name].shape)}, not {tuple(view.shape)}")
        torch._foreach_copy_(list(self._views.values()), [state[name] for name in self._views])
        self.copy_to_network()

    def set_buffers(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Set some buffers, by name."""
        for name, value in buffers.items():
            self._buffers[name].copy_(value)

    def buffer(self, name: str) -> torch.Tensor:
        return self._buffers[name]

    def polyak_update(self, other: Flat, tau: float = 1.0) -> None:
        """Move the weights towards those of `other` by the fraction tau (1 = copy), and copy its buffers."""
        if tau == 1.0:
            self.master.copy_(other.master)
        else:
            self.master.lerp_(other.master, tau)
        for name, own in self._buffers.items():
            own.copy_(other._buffers[name])
        self.copy_to_network()

    def named(self, vector: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of a vector of all parameters, by name."""
        views = vector.split([shape.numel() for shape in self.shapes.values()])
        return {name: view.view(shape) for (name, shape), view in zip(self.shapes.items(), views, strict=True)}


def is_finite(vector: torch.Tensor) -> bool:
    """True if all elements are finite. Tests the sum first, which is much faster."""
    return bool(vector.sum().isfinite()) or bool(vector.isfinite().all())


def scatter(grads: Sequence[torch.Tensor | None], views: list[torch.Tensor]) -> None:
    """Write gradients to their views; zeros for unused parameters."""
    present = [grad for grad in grads if grad is not None]
    if len(present) < len(grads):
        torch._foreach_zero_([view for view, grad in zip(views, grads, strict=True) if grad is None])
        views = [view for view, grad in zip(views, grads, strict=True) if grad is not None]
    torch._foreach_copy_(views, present)
