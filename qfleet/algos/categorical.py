"""Support of categorical return distributions: options shared by C51, HL-Gauss and D4PG."""

from __future__ import annotations

from typing import Annotated, Self

import torch
from pydantic import Field, model_validator

from qfleet.config import Config as Section
from qfleet.config import Integer, Real


class CategoricalConfig(Section):
    """Support of a categorical distribution: `atoms` values, equally spaced from `v_min` to `v_max`."""

    atoms: Annotated[Integer, Field(ge=2)] = Field(51, description="number of atoms of the support")
    v_min: Real = Field(
        -10.0, description="lower end of the support; smaller returns are clipped to it. In units of h(return) if "
                           "agent.rescale=true")
    v_max: Real = Field(
        10.0, description="upper end of the support; larger returns are clipped to it. In units of h(return) if "
                          "agent.rescale=true")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.v_min >= self.v_max:
            raise ValueError(f"agent.v_min={self.v_min:g} is not below agent.v_max={self.v_max:g}: raise v_max")
        return self

    def support(self, like: torch.Tensor) -> torch.Tensor:
        """Atoms [Z] on the device of `like`."""
        return torch.linspace(self.v_min, self.v_max, self.atoms, device=like.device)
