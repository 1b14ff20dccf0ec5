"""What a network takes while it is trained, in memory and on disk, known before it is built."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from qfleet.core.agent import Agent

LARGE = 1 << 24
"""Tensors of more numbers than this are counted, not allocated."""

LEARNING = 6
"""Copies of the weights that learning takes: the weights, the target network, the gradient as it is computed and as one
vector, and the optimizer's two moments."""

SAVED = 6
"""Copies in a checkpoint, at most: weights, target network, two moments, and older weights that were published and that
actors act on."""


@dataclass(frozen=True)
class Footprint:
    """Number of parameters and buffers, and the bytes of a float32 copy."""

    elements: int

    @property
    def copy_bytes(self) -> int:
        return 4 * self.elements

    def acting_bytes(self, policies: int) -> int:
        """Bytes of the weights that are published, and of as many networks that act."""
        return (1 + policies) * self.copy_bytes

    @property
    def learning_bytes(self) -> int:
        return LEARNING * self.copy_bytes

    @property
    def checkpoint_bytes(self) -> int:
        return SAVED * self.copy_bytes


class _Counted(TorchFunctionMode):
    """Inside, large tensors have a shape and no memory. Small ones are real: a network may be run to learn a shape."""

    FACTORIES = (torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn)

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        given = dict(kwargs or {})
        if func in self.FACTORIES and given.get("device") is None:
            sizes = args[0] if args and isinstance(args[0], Sequence) else args
            if all(isinstance(size, int) for size in sizes) and math.prod(sizes) > LARGE:
                given["device"] = "meta"
        return func(*args, **given)


def footprint(agent: Agent) -> Footprint:
    """Count the numbers of an agent's network; one that cannot be built without the large tensors counts nothing."""
    try:
        with torch.random.fork_rng(devices=[]), _Counted():
            net = agent.network()
    except Exception:  # it runs layers that are not there; what is wrong with it otherwise is told when it is built
        return Footprint(0)
    return Footprint(sum(tensor.numel() for tensor in [*net.parameters(), *net.buffers()]))
