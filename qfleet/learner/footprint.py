"""Memory and disk footprint of a network in training, estimated before it is built."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from qfleet.core.agent import Agent
from qfleet.core.errors import UserError

LARGE = 1 << 24
"""Tensors with more elements than this are counted, not allocated."""

TRAINING_COPIES = 6
"""Copies of the weights in training: weights, target network, gradient as computed and as one
vector, and the optimizer's two moments.
"""

CHECKPOINT_COPIES = 6
"""Maximum number of copies in a checkpoint: weights, target network, two moments, and older
published weights that actors still use.
"""


@dataclass(frozen=True)
class Footprint:
    """Number of elements of parameters and buffers, and the bytes derived from it."""

    elements: int

    @property
    def copy_bytes(self) -> int:
        return 4 * self.elements

    def acting_bytes(self, policies: int) -> int:
        """Bytes of the published weights and of the networks of `policies` policies."""
        return (1 + policies) * self.copy_bytes

    @property
    def learning_bytes(self) -> int:
        return TRAINING_COPIES * self.copy_bytes

    @property
    def checkpoint_bytes(self) -> int:
        return CHECKPOINT_COPIES * self.copy_bytes


class _WithoutLargeTensors(TorchFunctionMode):
    """Context in which large tensors have a shape and no memory.

    Small tensors are real, since a network may be run to infer a shape.
    """

    FACTORIES = (torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn)

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        options = dict(kwargs or {})
        if func in self.FACTORIES and options.get("device") is None:
            sizes = args[0] if args and isinstance(args[0], Sequence) else args
            if all(isinstance(size, int) for size in sizes) and math.prod(sizes) > LARGE:
                options["device"] = "meta"
        return func(*args, **options)


def footprint(agent: Agent) -> Footprint:
    """Count the elements of an agent's network; 0 if it cannot be built without its large tensors.

    Raises:
        UserError: the network refuses its settings.
    """
    try:
        with torch.random.fork_rng(devices=[]), _WithoutLargeTensors():
            net = agent.network()
    except UserError:
        raise
    except Exception:  # it runs layers without memory; any other error is raised when the network is built
        return Footprint(0)
    return Footprint(sum(tensor.numel() for tensor in [*net.parameters(), *net.buffers()]))
