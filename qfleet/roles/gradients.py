"""How gradients become a step of the weights. Alone, for now: clip, then the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import Field

from qfleet.config import Config, NonNegative, Positive
from qfleet.roles.flat import Flat


class OptimizerConfig(Config):
    """Which optimizer moves the weights."""

    optimizer: Literal["adam", "rmsprop"] = Field("adam", description="the rule that moves the weights")
    learning_rate: Positive = Field(1e-4, description="step size")
    optimizer_eps: Positive = Field(1e-8, description="added to the denominator of the step")
    clip_norm: NonNegative = Field(10.0, description="largest norm of the gradient, 0 = unlimited")


class Solo:
    """One learner, its own optimizer. `attach` once, `apply` after every backward pass."""

    def __init__(self, cfg: OptimizerConfig) -> None:
        self.cfg = cfg

    def attach(self, flat: Flat) -> None:
        """Build the optimizer for the network's float32 vector."""
        self.flat = flat
        self.vector = torch.nn.Parameter(flat.master, requires_grad=False)
        self.vector.grad = torch.zeros_like(flat.master) if flat.grad.dtype != torch.float32 else flat.grad
        rate, eps = self.cfg.learning_rate, self.cfg.optimizer_eps
        if self.cfg.optimizer == "adam":
            self.optimizer: torch.optim.Optimizer = torch.optim.Adam([self.vector], rate, eps=eps, fused=True)
        else:
            self.optimizer = torch.optim.RMSprop([self.vector], rate, alpha=0.95, eps=eps, centered=True)

    def apply(self) -> float:
        """Clip and step; returns the gradient's norm. A norm that is not finite changes nothing."""
        gradient = self.vector.grad
        assert gradient is not None
        if gradient is not self.flat.grad:
            gradient.copy_(self.flat.grad)
        norm = float(torch.linalg.vector_norm(gradient))
        if norm != norm or norm == float("inf"):
            return norm
        if 0 < self.cfg.clip_norm < norm:
            gradient.mul_(self.cfg.clip_norm / (norm + 1e-6))
        self.optimizer.step()
        self.flat.sync()
        return norm

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict(dict(state))
