"""A network's parameters as one vector: copies, clipping and optimizer steps become single operations.

Precision lives here, too: the optimizer moves `master` (float32); the network computes with `data`, which is the same
vector in float32 runs and a bfloat16 copy beside it in bfloat16 runs. On a GPU it is laid out as kernels like it:
every parameter begins at a multiple of 64 numbers, and channels of convolutions lie last. float64 networks, made by
tests of the maths, stay what they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType

import torch
from torch import nn

from qfleet.accel.kernels.kernel_compiler import (
    BLOCK_SIZE,
    TensorLayout,
    block_count,
    compile_kernel,
    concat_bf16_source,
)
from qfleet.core.agent import ParamGroup
from qfleet.core.errors import UserError
from qfleet.learner.optimizer import param_slices_of


class Flat:
    """The parameters of `net`, re-seated as views of one vector; buffers (running statistics) stay as they are.

    Invariant: `master` holds the truth in float32; after `sync`, `data` equals it rounded to `dtype`. `grad` is the
    float32 gradient that was gathered last, `rooms` its views, one per parameter. `parts` move at rates of their own.
    """

    def __init__(self, net: nn.Module, dtype: torch.dtype = torch.float32,
                 rates: Mapping[str, ParamGroup] = MappingProxyType({})) -> None:
        self.net, self.param_slices = net, param_slices_of(net, rates)
        self.parameters = list(net.parameters())
        if not self.parameters:
            raise UserError("the network has no parameters, so there is nothing to train: check agent.torso and "
                            "agent.hidden")
        device = self.parameters[0].device
        self.shapes = {name: parameter.shape for name, parameter in net.named_parameters()}
        size = sum(parameter.numel() for parameter in self.parameters)
        self._order: torch.Tensor | None = None  # of each number of `data`, its place in `master`
        same = dtype in (torch.float32, torch.float64)
        if same or device.type != "cuda":
            self.data = torch.empty(size, dtype=dtype, device=device)
            rooms = list(self.named(self.data).values())
        else:
            self._order = gather_index(list(self.shapes.values())).to(device)
            self.data = torch.empty(len(self._order), dtype=dtype, device=device)
            rooms = aligned_views(self.data, list(self.shapes.values()))
        self.master = torch.empty(size, dtype=dtype if same else torch.float32, device=device)
        for parameter, room, place in zip(self.parameters, rooms, self.named(self.master).values(), strict=True):
            room.copy_(parameter.detach())
            place.copy_(room)
            parameter.data = room
        self.master = self.data if same else self.master
        self._buffers = dict(net.named_buffers())
        self._views = self.named(self.master) | self._buffers
        trained = any(parameter.requires_grad for parameter in self.parameters)
        self.grad = torch.zeros(size if trained else 0, dtype=self.master.dtype, device=device)
        self.grad_views = list(self.named(self.grad).values()) if trained else []

    def gather(self, grads: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """One gradient per parameter as one float32 vector, `grad`; a parameter that took no part has zeros."""
        given = [grad for grad in grads if grad is not None]
        if self.grad.is_cuda and len(given) == len(grads) and all(grad.dtype == torch.bfloat16 for grad in given):
            self._join(given)
        else:
            scatter(grads, self.grad_views)
        return self.grad

    def _join(self, grads: Sequence[torch.Tensor]) -> None:
        """bfloat16 gradients on a GPU, by one kernel instead of a copy for each, one of all, and a conversion."""
        laid = [contiguous_piece(grad) for grad in grads]
        pieces = tuple(piece for _, piece in laid)
        same = [grad.shape for grad in grads] == list(self.shapes.values())  # a kernel would write on and on
        if same and (launch := compile_kernel("join", concat_bf16_source(pieces))) is not None:
            launch(block_count(pieces) * BLOCK_SIZE, [*(grad for grad, _ in laid), self.grad])
        else:
            self.grad.copy_(torch.cat([grad.reshape(-1) for grad in grads]))

    @cached_property
    def bf16_target(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Where a GPU's network reads its weights: `data`, and of each number of `master` its place there, int32."""
        if self._order is None:
            return None
        return self.data, scatter_index(list(self.shapes.values())).to(self.data.device)

    def copy_to_network(self) -> None:
        """Let the network compute with what the optimizer wrote."""
        if self._order is not None:
            self.data.copy_(self.master.index_select(0, self._order))
        elif self.data is not self.master:
            self.data.copy_(self.master)

    def state(self, master: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """A float32 copy of all weights and buffers, by name; with `master`, views of that vector for the weights."""
        vector = self.master.clone() if master is None else master
        return self.named(vector) | {name: value.clone() for name, value in self._buffers.items()}

    def load(self, state: Mapping[str, torch.Tensor], optional: Sequence[str] = ()) -> None:
        """Take weights and buffers, by name; every name and shape must fit. `optional` buffers may be missing."""
        state = {name: self._buffers[name] for name in optional} | dict(state)
        if self._views.keys() != state.keys():
            raise ValueError(f"weights differ in {sorted(self._views.keys() ^ state.keys())}")
        for name, view in self._views.items():
            if view.shape != state[name].shape:
                raise ValueError(f"weights of {name} are {tuple(state[name].shape)}, not {tuple(view.shape)}")
        torch._foreach_copy_(list(self._views.values()), [state[name] for name in self._views])
        self.copy_to_network()

    def set_buffers(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Take new values of some buffers, by name."""
        for name, value in buffers.items():
            self._buffers[name].copy_(value)

    def buffer(self, name: str) -> torch.Tensor:
        return self._buffers[name]

    def polyak_update(self, other: Flat, tau: float = 1.0) -> None:
        """Move towards another network: all the way (a copy), or a step of size tau."""
        if tau == 1.0:
            self.master.copy_(other.master)
        else:
            self.master.lerp_(other.master, tau)
        for name, mine in self._buffers.items():
            mine.copy_(other._buffers[name])
        self.copy_to_network()

    def named(self, vector: torch.Tensor) -> dict[str, torch.Tensor]:
        """A vector of all parameters as views of it, by name."""
        views = vector.split([shape.numel() for shape in self.shapes.values()])
        return {name: view.view(shape) for (name, shape), view in zip(self.shapes.items(), views, strict=True)}


def is_finite(vector: torch.Tensor) -> bool:
    """Whether all its numbers are: by their sum, which is found much sooner than what each of them is."""
    return bool(vector.sum().isfinite()) or bool(vector.isfinite().all())


def scatter(grads: Sequence[torch.Tensor | None], rooms: list[torch.Tensor]) -> None:
    """Write gradients where they belong; zeros for a parameter that took no part."""
    given = [grad for grad in grads if grad is not None]
    if len(given) < len(grads):
        torch._foreach_zero_([room for room, grad in zip(rooms, grads, strict=True) if grad is None])
        rooms = [room for room, grad in zip(rooms, grads, strict=True) if grad is not None]
    torch._foreach_copy_(rooms, given)


PARAM_ALIGNMENT = 64
"""Where parameters begin, on a GPU, in numbers: kernels for matrices move 16 bytes at once, or are much slower."""


def contiguous_piece(grad: torch.Tensor) -> tuple[torch.Tensor, TensorLayout]:
    """A gradient whose numbers lie without gaps, and how they lie."""
    if grad.is_contiguous():
        return grad, (grad.numel(), 1, 1)
    if grad.ndim == 4 and grad.is_contiguous(memory_format=torch.channels_last):
        return grad, (grad.numel(), grad.shape[1], grad.shape[2] * grad.shape[3])
    return grad.contiguous(), (grad.numel(), 1, 1)


def aligned_views(data: torch.Tensor, shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
    """Views of a vector, one for each shape, at multiples of BORDER; the channels of four axes lie last."""
    rooms, at = [], 0
    for shape in shapes:
        piece = data[at:at + shape.numel()]
        rooms.append(_last_channels(piece, shape))
        at += -(-shape.numel() // PARAM_ALIGNMENT) * PARAM_ALIGNMENT
    return rooms


def gather_index(shapes: Sequence[torch.Size]) -> torch.Tensor:
    """For each number of such a vector its place in one that has no gaps and all channels first; gaps show place 0."""
    sizes = [-(-shape.numel() // PARAM_ALIGNMENT) * PARAM_ALIGNMENT for shape in shapes]
    order, at = torch.zeros(sum(sizes), dtype=torch.int64), 0
    for room, shape in zip(aligned_views(order, shapes), shapes, strict=True):
        room.copy_(torch.arange(at, at + shape.numel()).view(shape))
        at += shape.numel()
    return order


def scatter_index(shapes: Sequence[torch.Size]) -> torch.Tensor:
    """The other way round, int32: for each number of the vector without gaps its place in the other."""
    at = torch.arange(len(gather_index(shapes)), dtype=torch.int32)
    return torch.cat([room.reshape(-1) for room in aligned_views(at, shapes)])


def _last_channels(piece: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    if len(shape) != 4:
        return piece.view(shape)
    features, channels, high, wide = shape
    return piece.view(features, high, wide, channels).permute(0, 3, 1, 2)
