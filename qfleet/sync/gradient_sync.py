"""Protocol for applying gradients, alone or together with other learners, and the single-learner case."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from qfleet.optim.flat_params import Flat
from qfleet.optim.optimizer import Optimizer, all_frozen
from qfleet.optim.optimizer_config import OptimizerConfig
from qfleet.optim.torch_optimizer import make_optimizer

__all__ = ["GradientSync", "OptimizerConfig", "Solo"]

Grads = Sequence[torch.Tensor | None]
"""One gradient per parameter; None for unused parameters."""


class GradientSync(Protocol):
    """Combines gradients with those of other learners and applies them.

    Per update the learner calls `agree` and, if it returns a factor, `apply`. Both may wait for
    other learners.
    """

    def attach(self, flat: Flat) -> None:
        """Take over the optimisation of the network's parameters; called once, before the first update.

        Args:
            flat: Parameters of the network as one vector.
        """

    def update_count(self, before: int, made: int) -> int:
        """Number of updates of the run.

        Args:
            before: Updates of the run when this learner last asked.
            made: Updates that this learner has made since.

        Returns:
            Updates of the run now.
        """

    @property
    def local_optimizer(self) -> Optimizer | None:
        """The optimizer, if its step needs neither other learners nor the host; else None."""

    def agree(self, max_weight: float | None) -> float | None:
        """Agree with the other learners on the next update.

        Args:
            max_weight: Largest importance weight of the batch before normalisation; None without a batch.

        Returns:
            Factor for the weights of the batch; None if no learner updates now.
        """

    def skips_frozen(self) -> bool:
        """Whether the next update changes no parameter group that has a period, so their gradient is not needed.

        Returns:
            True if it changes none. Always False if gradients are clipped by their norm, which needs all of them.
        """

    def apply(self, grads: Grads | None) -> float:
        """Apply a gradient.

        Args:
            grads: One gradient per parameter; None if the loss was not finite.

        Returns:
            Norm of the combined gradient. If it is not finite, nothing has changed on any learner.
        """

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint.

        Returns:
            State of the optimizer.
        """

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state.

        Args:
            state: Result of `state_dict`.
        """


class Solo:
    """A single learner with its own optimizer. `attach` once, then `apply` every gradient."""

    def __init__(self, cfg: OptimizerConfig) -> None:
        self.cfg = cfg

    def attach(self, flat: Flat) -> None:
        """Create the optimizer for the network's float32 vector."""
        self.flat = flat
        self.optimizer = make_optimizer(self.cfg, flat.master, flat.param_slices, flat.param_shapes)

    def update_count(self, before: int, made: int) -> int:
        return before + made

    @property
    def local_optimizer(self) -> Optimizer | None:
        return self.optimizer if isinstance(self.optimizer, Optimizer) else None

    def agree(self, max_weight: float | None) -> float | None:
        return None if max_weight is None else 1.0

    def skips_frozen(self) -> bool:
        return self.cfg.clip_norm == 0 and all_frozen(self.flat.param_slices, self.optimizer.count + 1)

    def apply(self, grads: Grads | None) -> float:
        if grads is None:
            return math.nan
        gradient = self.flat.gather(grads)
        norm = norm_of(gradient)
        if math.isfinite(norm):
            self.optimizer.step(gradient, norm)
            self.flat.copy_to_network()
        return norm

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict(state)


def norm_of(gradient: torch.Tensor) -> float:
    return math.sqrt(float(torch.dot(gradient, gradient)))
