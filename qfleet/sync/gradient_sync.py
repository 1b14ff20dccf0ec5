"""How gradients become a step of the weights: the seam behind which learners meet, and the one who learns alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from qfleet.learner.flat_params import Flat
from qfleet.learner.optimizer import Optimizer, OptimizerConfig, all_frozen

__all__ = ["GradientSync", "OptimizerConfig", "Solo"]

Grads = Sequence[torch.Tensor | None]
"""One gradient per parameter; None for a parameter that took no part."""


class GradientSync(Protocol):
    """A rule. Per update the learner calls `vote`, and if the answer is a number, `apply`: others may wait in both."""

    def attach(self, flat: Flat) -> None: ...

    def agree(self, max_weight: float | None) -> float | None:
        """Before every update. `peak` is the largest importance weight of the batch before normalisation, None if
        there is no batch. None = nobody updates now; else the factor that the batch's weights are multiplied by."""

    def skips_frozen(self) -> bool:
        """Whether it is known that the next update moves none of the parts that have a period: then it needs no
        gradient of theirs. Where gradients are clipped by their norm, it does."""

    def apply(self, grads: Grads | None) -> float:
        """Step; the norm of the gradient that was applied. `None` says that the loss was not finite. A norm that is
        not finite means that nothing has changed, here and everywhere."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Solo:
    """One learner, its own optimizer. `attach` once, then `apply` every gradient."""

    def __init__(self, cfg: OptimizerConfig) -> None:
        self.cfg = cfg

    def attach(self, flat: Flat) -> None:
        """The network's float32 vector is what the optimizer moves: one tensor, whatever the architecture."""
        self.flat, self.optimizer = flat, Optimizer(self.cfg, flat.master, flat.param_slices)

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
