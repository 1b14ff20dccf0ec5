"""How gradients become a step of the weights. Alone, for now: clip, then the optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from pydantic import Field

from qfleet.config import Config, NonNegative, Positive
from qfleet.roles.flat import Flat

BETAS = (0.9, 0.999)
RMS_DECAY = 0.95


class OptimizerConfig(Config):
    """Which optimizer moves the weights."""

    optimizer: Literal["adam", "rmsprop"] = Field("adam", description="the rule that moves the weights")
    learning_rate: Positive = Field(1e-4, description="step size")
    optimizer_eps: Positive = Field(1e-8, description="added to the denominator (adam) or under its root (rmsprop)")
    clip_norm: NonNegative = Field(10.0, description="largest norm of the gradient, 0 = unlimited")


class Solo:
    """One learner, its own optimizer. `attach` once, then `apply` every gradient."""

    def __init__(self, cfg: OptimizerConfig) -> None:
        self.cfg = cfg

    def attach(self, flat: Flat) -> None:
        """The network's float32 vector is what the optimizer moves: one tensor, whatever the architecture."""
        self.flat = flat
        self.steps = torch.zeros((), device=flat.master.device)
        self.mean, self.square = torch.zeros_like(flat.master), torch.zeros_like(flat.master)

    def apply(self, grads: Sequence[torch.Tensor | None]) -> float:
        """Clip and step; returns the gradient's norm. A norm that is not finite changes nothing."""
        gradient = self.flat.gather(grads)
        norm = math.sqrt(float(torch.dot(gradient, gradient)))
        if not math.isfinite(norm):
            return norm
        if 0 < self.cfg.clip_norm < norm:
            gradient.mul_(self.cfg.clip_norm / (norm + 1e-6))
        with torch.no_grad():
            self.steps += 1
            if self.cfg.optimizer == "adam":
                self._adam(gradient)
            else:
                self._rmsprop(gradient)
        self.flat.sync()
        return norm

    def _adam(self, gradient: torch.Tensor) -> None:
        """Kingma & Ba 2015, by the kernel behind torch.optim.Adam(fused=True) without the bookkeeping around it."""
        torch._fused_adam_(
            [self.flat.master], [gradient], [self.mean], [self.square], [], [self.steps], amsgrad=False,
            lr=self.cfg.learning_rate, beta1=BETAS[0], beta2=BETAS[1], weight_decay=0.0, eps=self.cfg.optimizer_eps,
            maximize=False, grad_scale=None, found_inf=None)

    def _rmsprop(self, gradient: torch.Tensor) -> None:
        """Centred RMSProp as Mnih et al. 2015 used it: g / √(E[g²] − E[g]² + ε), with ε = 0.01 there."""
        self.square.mul_(RMS_DECAY).addcmul_(gradient, gradient, value=1 - RMS_DECAY)
        self.mean.lerp_(gradient, 1 - RMS_DECAY)
        # The variance of a gradient that hardly changes is rounded below zero: clamped, or the root would be NaN.
        variance = self.square.addcmul(self.mean, self.mean, value=-1).clamp_(min=0)
        spread = variance.add_(self.cfg.optimizer_eps).sqrt_()
        self.flat.master.addcdiv_(gradient, spread, value=-self.cfg.learning_rate)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps.clone(), "mean": self.mean.clone(), "square": self.square.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps.copy_(state["steps"])
        self.mean.copy_(state["mean"])
        self.square.copy_(state["square"])
