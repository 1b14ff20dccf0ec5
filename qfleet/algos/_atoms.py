"""Fixed atoms on which the law of a return is told: the keys of every agent whose values are categorical."""

from __future__ import annotations

from typing import Annotated, Self

import torch
from pydantic import Field, model_validator

from qfleet.config import Config as Section
from qfleet.config import Real, Whole


class Atoms(Section):
    """`atoms` of them in equal steps from `v_min` to `v_max`."""

    atoms: Annotated[Whole, Field(ge=2)] = Field(51, description="atoms of the support")
    v_min: Real = Field(-10.0, description="least return that can be told, in the units that are learnt")
    v_max: Real = Field(10.0, description="largest return that can be told, in the units that are learnt")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.v_min >= self.v_max:
            raise ValueError(f"agent.v_min={self.v_min:g} is not below agent.v_max={self.v_max:g}: raise v_max")
        return self

    def support(self, like: torch.Tensor) -> torch.Tensor:
        """The atoms [Z], where `like` is."""
        return torch.linspace(self.v_min, self.v_max, self.atoms, device=like.device)
