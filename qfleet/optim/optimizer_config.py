"""Config of optimizer, learning rate and gradient clipping."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from pydantic import Field

from qfleet.config import Config, Count, Fraction, NonNegative, PluginName, Positive, PositiveCount
from qfleet.core.errors import UserError


class OptimizerName(PluginName):
    """Annotation of an optimizer's name; the message for `nadam` says how to use `torch.optim.NAdam`."""

    def check(self, name: str) -> str:
        try:
            return super().check(name)
        except UserError as error:
            of_torch = {found.lower(): found for found in vars(torch.optim) if found[0].isupper()}
            if (known := of_torch.get(name.rpartition(".")[2].lower())) is None:
                raise
            text = str(error).partition("; did you mean")[0]
            raise UserError(f"{text}; did you mean torch.optim:{known}?") from None


class OptimizerConfig(Config):
    """Optimizer, learning rate and gradient clipping."""

    optimizer: Annotated[str, OptimizerName(None, ("adam", "adamw", "rmsprop"))] = Field(
        "adam", description="adam, adamw (with decoupled weight decay), rmsprop (centred, as in Mnih et al. 2015), or "
                            "a torch.optim.Optimizer, as module:attribute, such as torch.optim:NAdam")
    optimizer_options: dict[str, Any] = Field(
        default_factory=dict, description="keyword arguments of an optimizer given as module:attribute, such as "
                                          "{momentum: 0.9}")
    learning_rate: Positive = Field(1e-4, description="learning rate of the optimizer; lower it if training diverges")
    schedule: Annotated[str, PluginName(None, ("constant", "linear", "cosine"))] = Field(
        "constant", description="how the learning rate changes over schedule_updates: constant, linear, cosine, or a "
                                "function of the progress from 0 to 1 that returns a factor, as module:attribute")
    warmup_updates: Count = Field(
        0, description="updates over which the learning rate rises linearly from 0, before the schedule begins")
    schedule_updates: PositiveCount | None = Field(
        None, description="updates, warm-up included, after which the schedule has reached its end; null = the updates "
                          "that the run will make, fixed when it starts")
    final_rate_fraction: Fraction = Field(
        0.0, description="learning rate at the end of a linear or cosine schedule, as a fraction of learning_rate")
    optimizer_eps: Positive = Field(
        1e-8, description="ε of the optimizer, added to the denominator (adam, adamw) or under its root (rmsprop)")
    weight_decay: NonNegative = Field(
        0.01, description="weight decay of adamw, times the learning rate; biases and the scales of normalisation "
                          "layers do not decay")
    clip_norm: NonNegative = Field(10.0, description="clip the global gradient norm to this value; 0 = no clipping")

    @property
    def has_own_optimizer(self) -> bool:
        """True if the optimizer is given as module:attribute."""
        return ":" in self.optimizer

    def inactive(self) -> dict[str, str]:
        idle: dict[str, str] = {}
        if self.has_own_optimizer:
            idle["optimizer_eps"] = f"with learner.optimizer={self.optimizer}: set learner.optimizer_options"
        else:
            idle["optimizer_options"] = "unless learner.optimizer=module:attribute"
        if self.optimizer != "adamw":
            own = f"; for {self.optimizer} write learner.optimizer_options={{weight_decay: {self.weight_decay}}}"
            idle["weight_decay"] = "unless learner.optimizer=adamw" + own * self.has_own_optimizer
        if self.schedule == "constant":
            idle["schedule_updates"] = "with learner.schedule=constant"
        if self.schedule not in ("linear", "cosine"):
            idle["final_rate_fraction"] = "unless learner.schedule is linear or cosine"
        return idle
